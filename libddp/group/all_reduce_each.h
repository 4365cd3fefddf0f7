#pragma once

// An all-reduce of several tensors at once: as they are where the backend takes lists or they lie
// back to back, else by way of one packed tensor.
// Thread rule: belongs to one call.
//
//   return state.issue(std::move(call), tensors, [&](Backend& to, BackendCall&& made) {
//     return all_reduce_each(to, std::move(made), operands, scale);
//   });

#include <vector>

#include "libddp/group/backend.h"
#include "libddp/group/operand.h"

namespace libddp {

/// REQUIRES: operands of one dtype, at least one.
WorkPtr all_reduce_each(Backend& to, BackendCall call, const std::vector<Operand>& operands,
                        double scale);

}  // namespace libddp
