#pragma once

// The parts of an exchange that a rank has with itself: no message travels for them.
//
// Thread rule: free functions.
//
//   for (const auto& [from, to] : take_own_parts(site, parts)) to.copy_(from);

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "libddp/group/backend.h"
#include "libddp/group/validation.h"

namespace libddp {

/// Takes them out of `parts` and pairs them, in order per tag: (from, to), to be copied. Throws
/// ArgumentError where a side is missing or the tensors do not fit.
std::vector<std::pair<at::Tensor, at::Tensor>> take_own_parts(const CallSite& site,
                                                              std::vector<Exchange>& parts);

}  // namespace libddp
