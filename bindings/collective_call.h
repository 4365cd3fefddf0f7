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
#include "libddp/interop/written_outputs.h"

namespace libddp {

using Timeout = std::optional<std::chrono::milliseconds>;

inline CallOptions options_of(bool async, Timeout timeout, std::string_view label = {}) {
  CallOptions options;
  options.async = async;
  options.timeout = timeout;
  options.label = label;
  return options;
}

/// As pybind11::gil_scoped_release, which looks up pybind11's own state each time: a collective on
/// a device takes microseconds in all.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* const state_;
};

/// `results`: the tensors that the operation writes.
template <class Issue>
pybind11::object issue(const ProcessGroup& group, c10d::OpType type,
                       at::ArrayRef<at::Tensor> results, bool async, Issue&& start) {
  if (async) {
    auto work = c10::make_intrusive<C10dWork>(type, group);
    {
      const WithoutInterpreter others_run;
      std::vector<std::vector<at::Tensor>> lists(1);
      lists[0] = results.vec();
      work->attach(start(), std::move(lists));
      note_written(type, results);
    }
    return pybind11::cast(c10::intrusive_ptr<c10d::Work>(std::move(work)));
  }
  {
    const WithoutInterpreter others_run;
    start()->wait();
    note_written(type, results);
  }
  return pybind11::none();  // counted with the lock
}

}  // namespace libddp
