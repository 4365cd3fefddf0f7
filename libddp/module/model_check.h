#pragma once

// Start-up check: do all ranks wrap the same model with the same options?
//
// One 64-bit hash per rank is compared; only where they differ the ranks exchange the descriptions
// and name the first difference, with the same words on every rank.
// Thread rule: collective.
//
//   check_model(*group, "DistributedDataParallel", describe_model(parameters, buffers,
//   "cap_bytes=26214400"));

#include <string>
#include <vector>

#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

/// One line per parameter ("parameter 'head.weight' float32 [10, 5] requires_grad=true") and
/// buffer; the options come last. `sparse`: names of parameters with sparse gradients.
std::vector<std::string> describe_model(const NamedTensors& parameters, const NamedTensors& buffers,
                                        const std::string& options,
                                        const std::vector<std::string>& sparse = {});

/// Throws ArgumentError on every rank where the lines of any two ranks differ.
/// `what` wraps it, for the message. `problem`: why this rank cannot wrap it at all, or empty; the
/// others throw it with this rank's number, and the group stays usable.
void check_model(ProcessGroup& group, const std::string& what,
                 const std::vector<std::string>& lines, const std::string& problem = {});

}  // namespace libddp
