// libddp for torch.distributed: the backend's creator, the way back to our group, rendezvous.

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "libddp/interop/c10d_backend.h"
#include "libddp/interop/from_c10d.h"
#include "libddp/interop/gloo_engine.h"
#include "libddp/interop/inter_engine.h"
#include "libddp/rendezvous/rendezvous.h"

namespace py = pybind11;

namespace libddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// None, "gloo", or a function (store, rank, world_size, address, timeout) -> Backend.
InterEngine engine_of(const py::object& inter) {
  if (inter.is_none()) return nullptr;
  if (py::isinstance<py::str>(inter)) return gloo_engine();
  using Made = BackendPtr(StorePtr, int, int, std::string, std::chrono::milliseconds);
  return inter_engine([make = inter.cast<std::function<Made>>()](const InterEngineOptions& given) {
    try {
      return make(given.store, given.rank, given.world_size, given.address, given.timeout);
    } catch (py::error_already_set& error) {
      const py::gil_scoped_acquire gil;
      if (error.matches(PyExc_ValueError) || error.matches(PyExc_TypeError)) {
        throw ArgumentError(error.what());
      }
      throw;
    }
  });
}

/// torch.distributed's creator of a registered backend.
BackendPtr create_backend(const c10d::DistributedBackendOptions& given, const py::object&,
                          const py::object& inter, std::optional<at::ScalarType> wire_dtype,
                          std::optional<int> sockets_per_link) {
  ProcessGroup::Options options;
  options.rank = given.group_rank;
  options.world_size = given.group_size;
  options.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(given.timeout);
  // torch's default group has a number for a name and no list of ranks.
  if (!given.global_ranks_in_group.empty()) options.name = given.group_id;
  for (std::int64_t rank : given.global_ranks_in_group) {
    options.global_ranks.push_back(static_cast<int>(rank));
  }
  options.inter = engine_of(inter);
  options.links = {.sockets_per_link = sockets_per_link, .wire_dtype = wire_dtype};
  py::gil_scoped_release release;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (given.enable_reconfigure) return C10dBackend::create_reconfigurable(given.store, options);
#endif
  Group group = ProcessGroup::create(given.store, options);
  return c10::make_intrusive<C10dBackend>(given.store, std::move(group));
}

constexpr bool kHasReconfigure =
#ifdef C10D_BACKEND_HAS_RECONFIGURE
    true;
#else
    false;
#endif

bool is_reconfigurable(const BackendPtr& backend) {
  const auto* const ours = dynamic_cast<C10dBackend*>(backend.get());
  return ours != nullptr && ours->is_reconfigurable();
}

/// For the error where there is no group behind a backend of ours yet.
Group members_of(const BackendPtr& backend) { return dynamic_cast<C10dBackend&>(*backend).group(); }

void drop_batch(const BackendPtr& backend) {
  if (auto* const ours = dynamic_cast<C10dBackend*>(backend.get())) ours->drop_batch();
}

template <class Source>
Group wrap(const Source& source, const std::string& name, const std::vector<int>& global_ranks,
           std::optional<std::chrono::milliseconds> timeout) {
  return from_c10d(source, {.name = name, .timeout = timeout, .global_ranks = global_ranks});
}

template <class Source>
void bind_from_c10d(py::module_& module) {
  module.def("from_c10d", &wrap<Source>, py::arg("group"), py::arg("name") = "",
             py::arg("global_ranks") = std::vector<int>(), py::arg("timeout") = py::none(),
             "A ProcessGroup over a group or backend of torch.distributed.");
}

py::tuple find_place(const std::string& init_method, std::optional<int> rank,
                     std::optional<int> world_size, std::chrono::milliseconds timeout) {
  RendezvousOptions options;
  options.init_method = init_method;
  options.rank = rank;
  options.world_size = world_size;
  options.timeout = timeout;
  Rendezvous found;
  {
    py::gil_scoped_release release;
    found = rendezvous(options);
  }
  return py::make_tuple(found.store, found.rank, found.world_size,
                        py::make_tuple(found.visit.place, found.visit.name));
}

}  // namespace

void bind_backend(py::module_& module) {
  module.attr("BACKEND_NAME") = C10dBackend::kName;
  // A method that torch looks for, and its base class has not: with
  // init_process_group(device_id=...) torch's new_group tells the ranks outside of the new group
  // about a split of the communicator.
  py::class_<C10dBackend, c10d::Backend, c10::intrusive_ptr<C10dBackend>>(module, "_C10dBackend")
      .def(
          "perform_nocolor_split", [](const C10dBackend&, const py::object&) {}, py::arg("device"),
          "Nothing: groups are made by their members alone.");
  module.def("create_backend", &create_backend, py::arg("options"), py::arg("pg_options"),
             py::arg("inter") = py::none(), py::arg("wire_dtype") = py::none(),
             py::arg("sockets_per_link") = py::none(),
             "Creates the c10d backend of one group; blocks until all its ranks have come.");
  bind_from_c10d<c10::intrusive_ptr<c10d::ProcessGroup>>(module);
  bind_from_c10d<BackendPtr>(module);
  module.def("group_of_backend", &C10dBackend::group_of, py::arg("backend"),
             "The ProcessGroup behind a c10d backend of ours; None for others, and while there is "
             "none.");
  module.attr("HAS_RECONFIGURE") = kHasReconfigure;
  module.def("is_reconfigurable", &is_reconfigurable, py::arg("backend"),
             "Whether it is a backend of ours whose members can change.");
  module.def("members_of", &members_of, py::arg("backend"),
             "As group_of_backend, of a backend of ours; raises where there is none.");
  module.def(
      "drop_batch", &drop_batch, py::arg("backend"),
      "Of a backend of ours: forgets the sends and receives of a batch that was not issued.");
  module.def("rendezvous", &find_place, py::arg("init_method"), py::arg("rank") = py::none(),
             py::arg("world_size") = py::none(), py::arg("timeout"),
             "(store, rank, world_size, visit) from env://, tcp:// or file://.");
  module.def(
      "remember_store",
      [](std::string place, std::string name) {
        remember({.place = std::move(place), .name = std::move(name)});
      },
      py::arg("place"), py::arg("name"),
      "The parts of a rendezvous' visit, when its group has been made.");
}

}  // namespace libddp
