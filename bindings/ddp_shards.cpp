// libddp._C.ShardedParameters and ShardedNumbers: what libddp.optim.AdamW(shard_over=...) calls.

#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/ddp_shards.h"
#include "libddp/ddp/sharded_parameters.h"

namespace py = pybind11;

namespace libddp {
namespace {

std::shared_ptr<ShardedParameters> sharded_parameters(Replica& replica) {
  const py::gil_scoped_release release;
  const Reducer& reducer = replica.reducer();
  return std::make_shared<ShardedParameters>(reducer.parameters(), replica.group(),
                                             reducer.shared_buckets());
}

std::vector<at::Tensor> own_gradients(const ShardedParameters& sharded,
                                      const std::vector<std::size_t>& indices) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(indices.size());
  for (const std::size_t index : indices) gradients.push_back(sharded.own_gradient(index));
  return gradients;
}

std::vector<at::Tensor> own_values(const ShardedParameters& sharded) {
  std::vector<at::Tensor> values;
  for (std::size_t index = 0; index < sharded.size(); ++index) values.push_back(sharded.own(index));
  return values;
}

}  // namespace

void bind_ddp_shards(py::module_& module, ReplicaClass& replica) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<ShardedNumbers, std::shared_ptr<ShardedNumbers>>(module, "ShardedNumbers")
      .def_property_readonly("is_shared", &ShardedNumbers::is_shared)
      .def("own", &ShardedNumbers::own, py::arg("parameter"))
      .def("whole", &ShardedNumbers::whole, py::arg("parameter"), unlocked)
      .def("load", &ShardedNumbers::load, py::arg("parameter"), py::arg("whole"), unlocked);
  py::class_<ShardedParameters, std::shared_ptr<ShardedParameters>>(module, "ShardedParameters")
      .def("own", &own_values)
      .def("own_gradients", &own_gradients, py::arg("indices"))
      .def("in_order", &ShardedParameters::in_order)
      .def("make_numbers", &ShardedParameters::make_numbers, unlocked)
      .def("begin_update", &ShardedParameters::begin_update, unlocked)
      .def("publish", &ShardedParameters::publish, unlocked);
  replica.def("shard", &Replica::shard)
      .def("has_blocks", [](Replica& self) { return self.reducer().has_blocks(); })
      .def("check_averaged", [](Replica& self) { self.reducer().check_averaged(); })
      .def("trained_names",
           [](Replica& self) {
             std::vector<std::string> names;
             for (const auto& parameter : self.reducer().parameters())
               names.push_back(parameter.name);
             return names;
           })
      .def("sharded_parameters", &sharded_parameters);
}

}  // namespace libddp
