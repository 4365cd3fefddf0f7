// libddp._C.ReplicatedModel: what libddp.nn.parallel.DistributedDataParallel calls.

#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/ddp_shards.h"
#include "bindings/ddp_timeline.h"
#include "bindings/tensors.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/reducer.h"
#include "libddp/ddp/replicated_model.h"

namespace py = pybind11;

namespace libddp {
namespace {

std::shared_ptr<ReplicatedModel> make_replicated_model(
    const PythonTensors& parameters, const PythonTensors& buffers, Group group,
    const DistributedDataParallelOptions& options, const PythonTensors& delayed,
    const std::optional<at::Tensor>& delayed_until) {
  const py::gil_scoped_release release;
  return std::make_shared<ReplicatedModel>(
      named(parameters), named(buffers), std::move(group), options, &rethrow_as_python_error,
      DelayedParameters{named(delayed), delayed_until.value_or(at::Tensor())});
}

void rejoin(ReplicatedModel& replica, Group group, const PythonTensors& buffers,
            const DistributedDataParallelOptions& options) {
  const py::gil_scoped_release release;
  replica.rejoin(std::move(group), named(buffers), options);
}

bool after_forward(ReplicatedModel& replica, py::handle output, bool sync) {
  std::vector<at::Tensor> found;
  if (replica.wants_outputs(sync)) collect_tensors_of(output, found);
  return replica.after_forward(found, sync);
}

// A hook of Python's: torch's own adapter calls it and reads its future.
void register_comm_hook(ReplicatedModel& replica, py::object state, py::object hook) {
  replica.reducer().register_comm_hook(
      std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook)));
}

void register_compress_hook(ReplicatedModel& replica, at::ScalarType dtype) {
  replica.reducer().register_comm_hook(compress_hook(replica.group(), dtype));
}

/// Parameter indices, bucket by bucket: for tests and for the curious.
BucketPlan bucket_plan(ReplicatedModel& replica) { return replica.buckets()->plan(); }

void bind_mixed_precision(py::module_& module) {
  using Dtype = std::optional<at::ScalarType>;
  py::class_<MixedPrecision>(module, "MixedPrecision")
      .def(py::init([](Dtype param_dtype, Dtype reduce_dtype, Dtype buffer_dtype) {
             return MixedPrecision{param_dtype, reduce_dtype, buffer_dtype};
           }),
           py::kw_only(), py::arg("param_dtype") = py::none(), py::arg("reduce_dtype") = py::none(),
           py::arg("buffer_dtype") = py::none());
}

void bind_options(py::module_& module) {
  using Options = DistributedDataParallelOptions;
  py::class_<Options>(module, "DistributedDataParallelOptions")
      .def(py::init<>())
      .def_readwrite("cap_bytes", &Options::cap_bytes)
      .def_readwrite("first_bytes", &Options::first_bytes)
      .def_readwrite("hook_first_bytes", &Options::hook_first_bytes)
      .def_readwrite("each_bytes", &Options::each_bytes)
      .def_readwrite("find_unused_parameters", &Options::find_unused_parameters)
      .def_readwrite("static_graph", &Options::static_graph)
      .def_readwrite("skip_unused_buckets", &Options::skip_unused_buckets)
      .def_readwrite("gradient_as_bucket_view", &Options::gradient_as_bucket_view)
      .def_readwrite("sparse_parameters", &Options::sparse_parameters)
      .def_readwrite("broadcast_buffers", &Options::broadcast_buffers)
      .def_readwrite("init_sync", &Options::init_sync)
      .def_readwrite("init_sync_buffers", &Options::init_sync_buffers)
      .def_readwrite("mixed_precision", &Options::mixed_precision);
}

void bind_passes(ReplicatedModelClass& replica) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  replica.def("before_forward", &ReplicatedModel::before_forward)
      .def("forward_failed", &ReplicatedModel::forward_failed, py::arg("what"), py::arg("sync"),
           unlocked)
      .def("backward_failed", &ReplicatedModel::backward_failed, py::arg("what"), unlocked)
      .def("after_forward", &after_forward, py::arg("output"), py::arg("sync"))
      .def("set_manual_finish",
           [](ReplicatedModel& self, bool manual) { self.set_manual_finalization(manual); })
      .def("finishes_after_backward",
           [](ReplicatedModel& self) { return self.reducer().should_finalize_after_backward(); })
      .def("check_finished", [](ReplicatedModel& self) { self.reducer().check_finalized(); })
      .def(
          "finish_backward", [](ReplicatedModel& self) { self.finalize_backward_manual(); },
          unlocked)
      .def(
          "run_empty_pass", [](ReplicatedModel& self) { self.reducer().run_empty_pass(); },
          unlocked);
}

}  // namespace

void bind_ddp(py::module_& module) {
  bind_mixed_precision(module);
  bind_options(module);
  ReplicatedModelClass replica(module, "ReplicatedModel");
  bind_ddp_timeline(replica);
  bind_ddp_shards(module, replica);
  replica
      .def(py::init(&make_replicated_model), py::kw_only(), py::arg("parameters"),
           py::arg("buffers"), py::arg("group"), py::arg("options"), py::arg("delayed"),
           py::arg("delayed_until"))
      .def("rejoin", &rejoin, py::arg("group"), py::kw_only(), py::arg("buffers"),
           py::arg("options"))
      .def("broadcast", &ReplicatedModel::broadcast, py::arg("tensors"), py::arg("root") = 0,
           py::call_guard<py::gil_scoped_release>())
      .def("set_static_graph", &ReplicatedModel::set_static_graph)
      .def("set_gradient_scale",
           [](ReplicatedModel& self, double scale) { self.reducer().set_gradient_scale(scale); })
      .def("register_comm_hook", &register_comm_hook, py::arg("state"), py::arg("hook"))
      .def("register_compress_hook", &register_compress_hook, py::arg("dtype"))
      .def("bucket_plan", &bucket_plan);
  bind_passes(replica);
}

}  // namespace libddp
