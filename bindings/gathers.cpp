// Data movement of libddp._C.ProcessGroup.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings/collective_call.h"
#include "bindings/collectives.h"

namespace py = pybind11;

namespace libddp {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Outputs as views in the input's shape where they have as many elements.
Tensors outputs_like(const Tensors& outputs, const at::Tensor& input) {
  Tensors views;
  for (const at::Tensor& output : outputs) views.push_back(movable(shaped_like(output, input)));
  return views;
}

py::object broadcast(ProcessGroup& self, const at::Tensor& tensor, int root, bool async,
                     Timeout timeout) {
  return issue(self, c10d::OpType::BROADCAST, {tensor}, async,
               [&] { return self.broadcast(movable(tensor), root, options_of(async, timeout)); });
}

py::object all_gather(ProcessGroup& self, const Tensors& outputs, const at::Tensor& input,
                      bool async, Timeout timeout) {
  return issue(self, c10d::OpType::ALLGATHER, outputs, async, [&] {
    return self.all_gather(outputs_like(outputs, input), movable(input),
                           options_of(async, timeout));
  });
}

py::object gather(ProcessGroup& self, const Tensors& outputs, const at::Tensor& input, int root,
                  bool async, Timeout timeout) {
  return issue(self, c10d::OpType::GATHER, outputs, async, [&] {
    return self.gather(outputs_like(outputs, input), movable(input), root,
                       options_of(async, timeout));
  });
}

py::object scatter(ProcessGroup& self, const at::Tensor& output, const Tensors& inputs, int root,
                   bool async, Timeout timeout) {
  return issue(self, c10d::OpType::SCATTER, {output}, async, [&] {
    return self.scatter(movable(output), outputs_like(inputs, output), root,
                        options_of(async, timeout));
  });
}

py::object all_to_all(ProcessGroup& self, const Tensors& outputs, const Tensors& inputs, bool async,
                      Timeout timeout) {
  return issue(self, c10d::OpType::ALLTOALL, outputs, async, [&] {
    return self.all_to_all(movable(outputs), movable(inputs), options_of(async, timeout));
  });
}

py::object all_to_all_single(ProcessGroup& self, const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& output_splits,
                             const std::vector<std::int64_t>& input_splits, bool async,
                             Timeout timeout) {
  return issue(self, c10d::OpType::ALLTOALL_BASE, {output}, async, [&] {
    return self.all_to_all_single(movable(output), movable(input), output_splits, input_splits,
                                  options_of(async, timeout));
  });
}

void bind_one_to_many(GroupClass& group) {
  group
      .def("broadcast", &broadcast, py::arg("tensor"), py::arg("root"), py::arg("async_op") = false,
           py::arg("timeout") = py::none(), "Copies `root`'s tensor to all ranks, in place.")
      .def("scatter", &scatter, py::arg("output"), py::arg("inputs"), py::arg("root"),
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "Gives each rank one of `root`'s inputs; the list is empty elsewhere.");
}

}  // namespace

py::object all_gather_into(ProcessGroup& self, const at::Tensor& output, const at::Tensor& input,
                           bool async, Timeout timeout) {
  return issue(self, c10d::OpType::_ALLGATHER_BASE, {output}, async, [&] {
    return self.all_gather_into(movable(output), movable(input), options_of(async, timeout));
  });
}

void bind_gathers(GroupClass& group) {
  bind_one_to_many(group);
  group
      .def("all_gather", &all_gather, py::arg("outputs"), py::arg("input"),
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "One output per rank; sizes may differ between ranks.")
      .def("all_gather_into", &all_gather_into, py::arg("output"), py::arg("input"),
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "As all_gather, with the outputs as blocks of one tensor.")
      .def("gather", &gather, py::arg("outputs"), py::arg("input"), py::arg("root"),
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "As all_gather, on `root` only; the list is empty elsewhere.")
      .def("all_to_all", &all_to_all, py::arg("outputs"), py::arg("inputs"),
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "Input i goes to rank i; output i comes from rank i.")
      .def("all_to_all_single", &all_to_all_single, py::arg("output"), py::arg("input"),
           py::arg("output_splits") = std::vector<std::int64_t>(),
           py::arg("input_splits") = std::vector<std::int64_t>(), py::arg("async_op") = false,
           py::arg("timeout") = py::none(), "As all_to_all, over rows of dim 0; no splits = even.");
}

}  // namespace libddp
