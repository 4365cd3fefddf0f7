#pragma once

// Says which parameters got no gradient, and on which ranks. Thread rule: collective.
//
//   throw StateError(describe_unused(*group, names, unused_here));

#include <cstdint>
#include <string>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// `unused[i]` != 0: this rank has no gradient for parameter i.
/// ENSURES: the same parameters and ranks in the text of every rank.
std::string describe_unused(ProcessGroup& group, const std::vector<std::string>& names,
                            const std::vector<std::uint8_t>& unused);

}  // namespace libddp
