#pragma once

// The collectives of libddp._C.ProcessGroup, by family.
// Thread rule: called once, at import.

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "libddp/group/process_group.h"

namespace libddp {

using GroupClass = pybind11::class_<ProcessGroup, std::shared_ptr<ProcessGroup>>;

/// all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_into.
void bind_reductions(GroupClass& group);
/// broadcast, all_gather, all_gather_into, gather, scatter, all_to_all, all_to_all_single.
void bind_gathers(GroupClass& group);
/// send, recv, barrier.
void bind_messages(GroupClass& group);

}  // namespace libddp
