#pragma once

// The collectives of libddp._C.ProcessGroup, by family.
// Thread rule: with the interpreter lock; what binds is called once, at import.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string_view>

#include "bindings/collective_call.h"
#include "libddp/group/process_group.h"

namespace libddp {

using GroupClass = pybind11::class_<ProcessGroup, std::shared_ptr<ProcessGroup>>;

/// What Python's methods of these names do. `async` = false: None.
pybind11::object all_reduce(ProcessGroup& self, const at::Tensor& tensor, pybind11::handle op,
                            bool async, Timeout timeout, std::string_view label);
pybind11::object all_gather_into(ProcessGroup& self, const at::Tensor& output,
                                 const at::Tensor& input, bool async, Timeout timeout);
pybind11::object reduce_scatter_into(ProcessGroup& self, const at::Tensor& output,
                                     const at::Tensor& input, pybind11::handle op, bool async,
                                     Timeout timeout);

/// all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_into.
void bind_reductions(GroupClass& group);
/// broadcast, all_gather, all_gather_into, gather, scatter, all_to_all, all_to_all_single.
void bind_gathers(GroupClass& group);
/// send, recv, barrier.
void bind_messages(GroupClass& group);

}  // namespace libddp
