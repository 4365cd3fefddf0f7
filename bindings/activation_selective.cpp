// What libddp.utils.checkpoint.create_selective_checkpoint_contexts is made of.

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/activation.h"
#include "libddp/activation/selective_store.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// A class of its own: pybind11 would copy a plain set into a Python one.
struct KeptOperators {
  std::shared_ptr<const OperatorSet> operators;
};

std::pair<std::shared_ptr<SavingRun>, std::shared_ptr<ReplayRun>> selective_contexts(
    const KeptOperators& kept, bool allow_mutation) {
  const auto store = std::make_shared<SelectiveStore>(kept.operators, allow_mutation);
  return {std::make_shared<SavingRun>(store), std::make_shared<ReplayRun>(store)};
}

}  // namespace

void bind_activation_selective(py::module_& module) {
  py::class_<KeptOperators>(module, "OperatorSet", "Operators whose results are kept.")
      .def(py::init([](const std::vector<std::pair<std::string, std::string>>& names) {
             return KeptOperators{std::make_shared<const OperatorSet>(operators_named(names))};
           }),
           py::arg("names"));
  py::class_<SavingRun, std::shared_ptr<SavingRun>>(module, "SavingRun",
                                                    "A forward pass that keeps results.")
      .def("__enter__", [](SavingRun& self) { self.enter(); })
      .def("__exit__", [](SavingRun& self, const py::args&) { self.leave(); });
  py::class_<ReplayRun, std::shared_ptr<ReplayRun>>(module, "ReplayRun",
                                                    "A replay that is handed kept results.")
      .def("__enter__",
           [](ReplayRun& self) {
             self.rewind();
             self.enter();
           })
      .def("__exit__", [](ReplayRun& self, const py::args&) { self.leave(); });
  module.def("can_keep_results", &OpInterceptor::is_available,
             "Whether results can be kept in C++ with this torch.");
  module.def("selective_contexts", &selective_contexts, py::arg("operators"),
             py::arg("allow_mutation"), "The contexts of one block's forward pass and replays.");
}

}  // namespace libddp
