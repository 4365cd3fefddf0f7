// Point to point and barrier of libddp._C.ProcessGroup.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings/collective_call.h"
#include "bindings/collectives.h"

namespace py = pybind11;

namespace libddp {
namespace {

py::object send(ProcessGroup& self, const at::Tensor& tensor, int target, int tag, bool async,
                Timeout timeout) {
  return issue(self, c10d::OpType::SEND, {tensor}, async,
               [&] { return self.send(movable(tensor), target, tag, options_of(async, timeout)); });
}

/// Synchronous: the rank that it came from.
py::object recv(ProcessGroup& self, const at::Tensor& tensor, std::optional<int> source, int tag,
                bool async, Timeout timeout) {
  const auto type = source ? c10d::OpType::RECV : c10d::OpType::RECVANYSOURCE;
  WorkPtr received;
  py::object work = issue(self, type, {tensor}, async, [&] {
    received = self.recv(movable(tensor), source, tag, options_of(async, timeout));
    return received;
  });
  if (async) return work;
  return py::int_(source ? *source : received->source_rank());
}

py::object barrier(ProcessGroup& self, bool async, Timeout timeout) {
  return issue(self, c10d::OpType::BARRIER, {}, async,
               [&] { return self.barrier(options_of(async, timeout)); });
}

}  // namespace

void bind_messages(GroupClass& group) {
  group
      .def("send", &send, py::arg("tensor"), py::arg("target"), py::arg("tag") = 0,
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "Sends to a rank of this group; ends when the receiver has taken it.")
      .def("recv", &recv, py::arg("tensor"), py::arg("source") = py::none(), py::arg("tag") = 0,
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "Receives from `source`, or from any rank; returns the rank that it came from.")
      .def("barrier", &barrier, py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "Ends when all ranks have come.");
}

}  // namespace libddp
