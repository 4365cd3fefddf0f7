// libddp._C.ParamGroup and ShardedModel: what libddp.distributed.fsdp calls.

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fsdp_python_faces.h"
#include "bindings/tensors.h"
#include "libddp/autograd/gradient_dtype.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/param_group.h"
#include "libddp/fsdp/sharded_model.h"
#include "libddp/module/broadcast_tensors.h"
#include "libddp/module/grad_norm.h"

namespace py = pybind11;

namespace libddp {
namespace {

std::shared_ptr<ParamGroup> make_param_group(std::string name, const PythonTensors& parameters,
                                             Group shard, Group replicate, bool keep_unsharded,
                                             std::optional<at::ScalarType> param_dtype,
                                             std::set<std::string> keep_dtype,
                                             std::optional<at::ScalarType> reduce_dtype,
                                             bool wide_gradients, bool keep_low_gradients,
                                             std::optional<at::Device> compute_device,
                                             bool pin_memory) {
  const py::gil_scoped_release release;
  auto unit = std::make_shared<ParamGroup>(
      std::move(name), named(parameters),
      ShardOptions{std::move(shard), std::move(replicate), keep_unsharded, param_dtype,
                   std::move(keep_dtype), reduce_dtype, wide_gradients, keep_low_gradients,
                   compute_device, pin_memory});
  unit->on_error(&rethrow_as_python_error);
  return unit;
}

using ParamGroups = std::vector<std::shared_ptr<ParamGroup>>;

void show_copies(ShardedModel& model, const ParamGroups& units, bool with_gradients, bool here) {
  model.show_copies(units, {with_gradients, here});
}

std::shared_ptr<ShardedModel> make_model(ParamGroups units, bool forward_prefetch,
                                         bool backward_prefetch, const py::object& faces) {
  ShardedModelOptions options{forward_prefetch, backward_prefetch, &rethrow_as_python_error};
  if (!faces.is_none()) options.faces = std::make_shared<PythonFaces>(faces, units);
  return ShardedModel::create(std::move(units), std::move(options));
}

void broadcast_tensors(Group group, const std::vector<at::Tensor>& tensors, int root) {
  const py::gil_scoped_release release;
  TensorBroadcaster(std::move(group)).broadcast(tensors, root, "parameters and buffers");
}

void finish_forward(ShardedModel& model, ParamGroup& unit, py::handle output, bool is_apart) {
  std::vector<at::Tensor> found;
  collect_tensors_of(output, found);
  const py::gil_scoped_release release;
  model.after_forward(unit, found, is_apart);
}

/// (name, global shape, [begin, end) of a rank in elements, shape of that part).
py::list layout_of(const ParamGroup& unit, int rank) {
  py::list rows;
  for (const auto& flat : unit.flats()) {
    for (std::size_t i = 0; i < flat->size(); ++i) {
      const FlatLayout::ShardSpec shard = flat->layout().shard(i, rank);
      rows.append(py::make_tuple(flat->parameters()[i].name, flat->layout().shape(i), shard.begin,
                                 shard.end, flat->layout().shard_shape(i, rank)));
    }
  }
  return rows;
}

bool has_gradient_memory(const ParamGroup& unit) {
  return std::any_of(unit.flats().begin(), unit.flats().end(),
                     [](const auto& flat) { return flat->gradient().has_memory(); });
}

/// Names of the parameters that the last pass has given averages, until their late hooks have run.
std::vector<std::string> averaged_of(const ParamGroup& unit) {
  std::vector<std::string> names;
  for (const auto& flat : unit.flats()) {
    for (std::size_t i = 0; i < flat->size(); ++i) {
      if (flat->gradient().is_installed(i)) names.push_back(flat->parameters()[i].name);
    }
  }
  return names;
}

/// Names of the parameters whose `.grad` shows what no pass has averaged.
std::vector<std::string> waiting_of(const ParamGroup& unit) {
  std::vector<std::string> names;
  for (const auto& flat : unit.flats()) {
    for (std::size_t i = 0; i < flat->size(); ++i) {
      if (flat->accumulated().shows_waiting(i)) names.push_back(flat->parameters()[i].name);
    }
  }
  return names;
}

/// `hook(gradients, average)`, or `hook(gradients)` where nothing is sharded; None = no hook.
void reduce_by(ParamGroup& unit, const py::object& hook) {
  if (hook.is_none()) return unit.reduce_by(nullptr);
  // Released under the lock, whichever thread lets go of the unit.
  const std::shared_ptr<py::object> held(new py::object(hook), [](py::object* object) {
    const py::gil_scoped_acquire acquire;
    delete object;
  });
  unit.reduce_by([held](const at::Tensor& gradients, const at::Tensor& average) {
    try {
      const py::gil_scoped_acquire acquire;
      gradients.is_same(average) ? (*held)(gradients) : (*held)(gradients, average);
    } catch (...) {
      rethrow_as_python_error(std::current_exception());
    }
  });
}

/// (group or None, dtype of the norm, gradients or None, device), as RankGradients.
using PythonGradients =
    std::tuple<Group, at::ScalarType, std::vector<std::optional<at::Tensor>>, at::Device>;

at::Tensor total_norm_of(const std::vector<PythonGradients>& all, double norm_type,
                         std::optional<at::ScalarType> computed_in) {
  std::vector<RankGradients> found;
  for (const auto& [group, dtype, gradients, device] : all) {
    found.push_back({group, dtype, {}, device});
    for (const auto& gradient : gradients) {
      found.back().gradients.push_back(gradient.value_or(at::Tensor()));
    }
  }
  const py::gil_scoped_release release;
  return total_norm(found, norm_type, computed_in);
}

}  // namespace

void bind_fsdp(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  bind_fsdp_faces(module);
  py::class_<ParamGroup, std::shared_ptr<ParamGroup>>(module, "ParamGroup")
      .def(py::init(&make_param_group), py::kw_only(), py::arg("name"), py::arg("parameters"),
           py::arg("shard"), py::arg("replicate"), py::arg("keep_unsharded"),
           py::arg("param_dtype"), py::arg("keep_dtype"), py::arg("reduce_dtype"),
           py::arg("wide_gradients"), py::arg("keep_low_gradients"), py::arg("compute_device"),
           py::arg("pin_memory"))
      .def_property_readonly("name", &ParamGroup::name)
      .def_property_readonly("is_held", &ParamGroup::is_held)
      .def_property_readonly("is_whole", &ParamGroup::is_unsharded)
      .def_property_readonly("is_running",
                             [](const ParamGroup& unit) { return unit.forward.running > 0; })
      .def("leave", &ParamGroup::leave, unlocked)
      .def("layout", &layout_of, py::arg("rank"))
      .def("has_gradient_memory", &has_gradient_memory)
      .def("averaged", &averaged_of)
      .def("waiting", &waiting_of)
      .def("divide_gradients_by", &ParamGroup::divide_gradients_by, py::arg("divisor"))
      .def("zero_unused", &ParamGroup::zero_unused, py::arg("zeroes"))
      .def("show_waiting", &ParamGroup::show_waiting, py::arg("shows"))
      .def("set_sync", &ParamGroup::set_sync, py::arg("sync"))
      .def("reduce_by", &reduce_by, py::arg("hook"));
  py::class_<ShardedModel, std::shared_ptr<ShardedModel>>(module, "ShardedModel")
      .def(py::init(&make_model), py::arg("units"), py::kw_only(), py::arg("forward_prefetch"),
           py::arg("backward_prefetch"), py::arg("faces") = py::none())
      .def("before_forward", &ShardedModel::before_forward, py::arg("unit"),
           py::arg("is_apart") = false, unlocked)
      .def("after_forward", &finish_forward, py::arg("unit"), py::arg("output"),
           py::arg("is_apart") = false)
      .def("forward_failed", &ShardedModel::forward_failed, py::arg("unit"), py::arg("what"),
           unlocked)
      .def("reach_from_within", &ShardedModel::reach_from_within, py::arg("unit"), unlocked)
      .def("report_error", &ShardedModel::report_error, py::arg("what"), unlocked)
      .def("backward_failed", &ShardedModel::backward_failed, py::arg("what"), unlocked)
      .def_property("syncs", &ShardedModel::syncs, &ShardedModel::set_sync)
      .def("publish", &ShardedModel::publish, unlocked)
      .def("finish_copies", &ShardedModel::finish_copies, unlocked)
      .def("shows_larger_gradients", &ShardedModel::shows_larger_gradients)
      .def("average_waiting", &ShardedModel::average_waiting, unlocked)
      .def("unshard", &ShardedModel::unshard, py::arg("unit"), unlocked)
      .def("reshard", &ShardedModel::reshard, py::arg("unit"), unlocked)
      .def("show_copies", &show_copies, py::arg("units"), py::kw_only(), py::arg("with_gradients"),
           py::arg("here"), unlocked)
      .def("end_copies", py::overload_cast<const ParamGroups&, bool>(&ShardedModel::end_copies),
           py::arg("units"), py::arg("keep"), unlocked);
  module.def("broadcast_tensors", &broadcast_tensors, py::arg("group"), py::arg("tensors"),
             py::arg("root"));
  module.def("keep_gradient_dtype", &keep_gradient_dtype, py::arg("output"));
  module.def("total_norm", &total_norm_of, py::arg("gradients"), py::arg("norm_type"),
             py::arg("computed_in") = std::nullopt);
}

}  // namespace libddp
