// libddp._C.AdamwShards: what libddp.optim.AdamW(shard_over=...) calls.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/ddp_shards.h"
#include "libddp/optim/adamw_shards.h"

namespace py = pybind11;

namespace libddp {
namespace {

using ShardTensors = std::vector<at::Tensor>;

std::unique_ptr<AdamwShards> shard_adamw(ReplicatedModel& replica, const ShardTensors& parameters,
                                         bool shard_gradients) {
  return std::make_unique<AdamwShards>(replica, parameters, shard_gradients);
}

void update_shards(AdamwShards& shards, const ShardTensors& parameters, const ShardTensors& steps,
                   double lr, double beta1, double beta2, double eps, double weight_decay,
                   bool amsgrad, bool maximize, const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf) {
  shards.update(parameters, steps, {lr, beta1, beta2, eps, weight_decay, amsgrad, maximize},
                grad_scale.value_or(at::Tensor()), found_inf.value_or(at::Tensor()));
}

ShardTensors trained_parameters(const AdamwShards& shards) {
  ShardTensors tensors;
  for (const NamedTensor& parameter : shards.parameters()) tensors.push_back(parameter.tensor);
  return tensors;
}

ShardTensors load_moments(AdamwShards& shards, const at::Tensor& parameter,
                          const std::vector<std::optional<at::Tensor>>& whole) {
  ShardTensors tensors;
  for (const auto& moment : whole) tensors.push_back(moment.value_or(at::Tensor()));
  return shards.load_moments(parameter, tensors);
}

/// Of those that there are.
std::vector<std::string> moment_names(const AdamwShards& shards) {
  const auto& names = AdamwShards::moment_names();
  return {names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shards.num_moments())};
}

at::Tensor own_gradient_of(const AdamwShards& shards, const at::Tensor& parameter) {
  return shards.own_gradient(shards.index_of(parameter));
}

}  // namespace

void bind_ddp_shards(py::module_& module, ReplicatedModelClass& replica) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<AdamwShards>(module, "AdamwShards")
      .def_property_readonly("moment_names", &moment_names)
      .def_property_readonly("parameters", &trained_parameters)
      .def_property_readonly("is_ready", &AdamwShards::is_ready)
      .def("check", &AdamwShards::check, py::arg("parameters"))
      .def("check_member", &AdamwShards::check_member)
      .def("check_averaged", &AdamwShards::check_averaged)
      .def("make_ready", &AdamwShards::make_ready, py::arg("amsgrad"), unlocked)
      .def("begin_update", &AdamwShards::begin_update, unlocked)
      .def("update", &update_shards, py::arg("parameters"), py::arg("steps"), py::kw_only(),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("amsgrad"), py::arg("maximize"),
           py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(), unlocked)
      .def("publish", &AdamwShards::publish, unlocked)
      .def("own_gradient", &own_gradient_of, py::arg("parameter"))
      .def("new_moments", &AdamwShards::new_moments, py::arg("parameter"))
      .def("load_moments", &load_moments, py::arg("parameter"), py::arg("whole"), unlocked)
      .def("whole_moments", &AdamwShards::whole_moments, py::arg("parameter"), unlocked);
  module.def("check_adamw_parameters", &check_adamw_parameters, py::arg("parameters"));
  replica.def("shard_adamw", &shard_adamw, py::arg("parameters"), py::arg("shard_gradients"));
}

}  // namespace libddp
