// libddp._C.ProcessGroup: who and where, memory, life and death. Its collectives: collectives.cpp.

#include "libddp/group/process_group.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/collectives.h"

namespace py = pybind11;

namespace libddp {
namespace {

void bind_identity(GroupClass& group) {
  group.def("rank", &ProcessGroup::rank, "This process's rank in the group.")
      .def("size", &ProcessGroup::size, "Number of ranks.")
      .def("name", &ProcessGroup::name, "Name in messages.")
      .def("global_ranks", &ProcessGroup::global_ranks,
           "Rank in the default group of each member, ordered by rank here.")
      .def("backend_name", &ProcessGroup::backend_name, "What moves the bytes.")
      .def("sequence_number", &ProcessGroup::sequence_number, "Collectives issued so far.")
      .def_property("timeout", &ProcessGroup::timeout, &ProcessGroup::set_timeout,
                    "Deadline of operations that name none (timedelta).")
      .def("__repr__", [](const ProcessGroup& self) {
        return "<libddp.ProcessGroup " + self.name() + ", rank " + std::to_string(self.rank()) +
               "/" + std::to_string(self.size()) + ">";
      });
}

void bind_memory(GroupClass& group) {
  group.def(
      "allocate",
      [](ProcessGroup& self, const std::vector<std::int64_t>& sizes, at::ScalarType dtype,
         at::Device device) {
        py::gil_scoped_release release;
        return self.allocate(sizes, dtype, device);
      },
      py::arg("sizes"), py::arg("dtype") = at::kFloat, py::arg("device") = at::Device(at::kCPU),
      "Uninitialised tensor in the group's arena: its collectives copy nothing.");
  group.def(
      "moves",
      [](const ProcessGroup& self, const at::Tensor& tensor) {
        return self.moves(tensor.device().type());
      },
      py::arg("tensor"), "Whether the group can move tensors on the device of `tensor`.");
}

void bind_life(GroupClass& group) {
  group
      .def(
          "split",
          [](ProcessGroup& self, const std::vector<int>& ranks, const std::string& name) {
            Group part;
            {
              py::gil_scoped_release release;
              part = self.split(ranks, name);
            }
            return part;
          },
          py::arg("ranks"), py::arg("name"),
          "A group of some of the ranks; None on a rank that is not among them.")
      .def("abort", &ProcessGroup::abort, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>(),
           "Ends every operation in flight here and, at once, on the other ranks.")
      .def("report_error", &ProcessGroup::report_error, py::arg("what"),
           py::call_guard<py::gil_scoped_release>(),
           "Ranks that wait for this one raise `what` after 250 ms, unless it is taken back.")
      .def("retract_error", &ProcessGroup::retract_error, py::call_guard<py::gil_scoped_release>(),
           "Takes report_error back; so does this rank's next collective.")
      .def("flight_log", &ProcessGroup::flight_log, py::call_guard<py::gil_scoped_release>(),
           "The last operations as JSON; docs/failures.md.")
      .def(
          "check",
          [](const ProcessGroup& self) {
            if (const auto failure = self.failure()) std::rethrow_exception(failure);
          },
          "Raises what the group failed with; does nothing while it is healthy.")
      .def(
          "has_failed", [](const ProcessGroup& self) { return self.failure() != nullptr; },
          "True once the group has failed or was aborted.")
      .def("shutdown", &ProcessGroup::shutdown, py::call_guard<py::gil_scoped_release>(),
           "Leaves in order, after the operations in flight.");
}

}  // namespace

void bind_process_group(py::module_& module) {
  GroupClass group(module, "ProcessGroup",
                   "Ranks that communicate. Collectives must be called by all ranks in the same "
                   "order; the first failure is thrown again by every later call.");
  bind_identity(group);
  bind_memory(group);
  bind_life(group);
  bind_reductions(group);
  bind_gathers(group);
  bind_messages(group);
}

}  // namespace libddp
