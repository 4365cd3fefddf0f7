#pragma once

// How each collective of the Python ProcessGroup is issued.
//
// Synchronous: runs inline without the interpreter lock and returns None. Asynchronous: returns
// torch's Work, the same class that torch.distributed hands out. Either way a profiler sees one
// event `libddp:<operation>`.
// Thread rule: called with the interpreter lock held.
//
//   return issue(group, {c10d::OpType::BARRIER, "libddp:barrier"}, {}, async,
//                [&] { return group.barrier(options); });

#include <ATen/record_function.h>
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

/// What a collective is to profilers.
struct Title {
  c10d::OpType type;
  const char* text;
};

/// `op` of Python: the enumeration, or a ReduceOp object (PREMUL_SUM carries its factor in one).
inline c10d::ReduceOp cast_reduce_op(pybind11::handle op) {
  pybind11::detail::make_caster<c10d::ReduceOp::RedOpType> enumerator;
  if (enumerator.load(op, /*convert=*/false)) {
    return c10d::ReduceOp(pybind11::detail::cast_op<c10d::ReduceOp::RedOpType>(enumerator));
  }
  return op.cast<c10d::ReduceOp>();
}

/// Tensors for a profiler's event.
inline std::vector<c10::IValue> recorded(const std::vector<at::Tensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

using Timeout = std::optional<std::chrono::milliseconds>;

inline CallOptions options_of(bool async, Timeout timeout, std::string_view label = {}) {
  CallOptions options;
  options.async = async;
  options.timeout = timeout;
  options.label = label;
  return options;
}

template <class Issue>
pybind11::object issue(const ProcessGroup& group, Title title,
                       const std::vector<at::Tensor>& tensors, bool async, Issue&& start) {
  if (async) {
    auto work =
        c10::make_intrusive<C10dWork>(C10dOperation{title.type, title.text, &group, tensors});
    {
      pybind11::gil_scoped_release release;
      work->attach(start(), {tensors});
    }
    return pybind11::cast(c10::intrusive_ptr<c10d::Work>(std::move(work)));
  }
  at::RecordFunction event(at::RecordScope::USER_SCOPE);
  if (event.isActive()) {
    const auto inputs = recorded(tensors);
    event.before(title.text, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }
  pybind11::gil_scoped_release release;
  start()->wait();
  return pybind11::none();
}

}  // namespace libddp
