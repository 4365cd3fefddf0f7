#pragma once

// How each collective of the Python ProcessGroup is issued.
//
// Synchronous: runs inline without the interpreter lock and returns None. Asynchronous: returns
// torch's Work, the same class that torch.distributed hands out.
// Thread rule: called with the interpreter lock held.
//
//   return issue(group, c10d::OpType::BARRIER, {}, async, [&] { return group.barrier(options); });

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "libddp/interop/c10d_work.h"
#include "libddp/interop/convert.h"

namespace libddp {

/// `op` of Python: the enumeration, or a ReduceOp object (PREMUL_SUM carries its factor in one).
inline c10d::ReduceOp cast_reduce_op(pybind11::handle op) {
  pybind11::detail::make_caster<c10d::ReduceOp::RedOpType> enumerator;
  if (enumerator.load(op, /*convert=*/false)) {
    return c10d::ReduceOp(pybind11::detail::cast_op<c10d::ReduceOp::RedOpType>(enumerator));
  }
  return op.cast<c10d::ReduceOp>();
}

using Timeout = std::optional<std::chrono::milliseconds>;

inline CallOptions options_of(bool async, Timeout timeout, std::string_view label = {}) {
  CallOptions options;
  options.async = async;
  options.timeout = timeout;
  options.label = label;
  return options;
}

/// `results`: the tensors that the operation writes.
template <class Issue>
pybind11::object issue(const ProcessGroup& group, c10d::OpType type,
                       const std::vector<at::Tensor>& results, bool async, Issue&& start) {
  if (async) {
    auto work = c10::make_intrusive<C10dWork>(type, group);
    {
      pybind11::gil_scoped_release release;
      work->attach(start(), {results});
    }
    return pybind11::cast(c10::intrusive_ptr<c10d::Work>(std::move(work)));
  }
  pybind11::gil_scoped_release release;
  start()->wait();
  return pybind11::none();
}

}  // namespace libddp
