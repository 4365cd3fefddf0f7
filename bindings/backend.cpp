// libddp for torch.distributed: the backend's creator, the way back to our group, rendezvous.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/groups.h"
#include "libddp/group/rendezvous.h"
#include "libddp/interop/c10d_backend.h"

namespace py = pybind11;

namespace libddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// torch.distributed's creator of a registered backend.
BackendPtr create_backend(const c10d::DistributedBackendOptions& given, const py::object&) {
  ProcessGroup::Options options;
  options.rank = given.group_rank;
  options.world_size = given.group_size;
  options.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(given.timeout);
  // torch's default group has a number for a name and no list of ranks.
  if (!given.global_ranks_in_group.empty()) options.name = given.group_id;
  for (std::int64_t rank : given.global_ranks_in_group) {
    options.global_ranks.push_back(static_cast<int>(rank));
  }
  Group group;
  {
    py::gil_scoped_release release;
    group = ProcessGroup::create(given.store, options);
  }
  return c10::make_intrusive<C10dBackend>(given.store, hold(std::move(group)));
}

py::tuple find_place(const std::string& init_method, std::optional<int> rank,
                     std::optional<int> world_size, std::chrono::milliseconds timeout) {
  InitOptions options;
  options.init_method = init_method;
  options.rank = rank;
  options.world_size = world_size;
  options.timeout = timeout;
  Rendezvous found;
  {
    py::gil_scoped_release release;
    found = rendezvous(options);
  }
  return py::make_tuple(found.store, found.rank, found.world_size);
}

}  // namespace

void bind_backend(py::module_& module) {
  module.attr("BACKEND_NAME") = C10dBackend::kName;
  module.def("create_backend", &create_backend, py::arg("options"), py::arg("pg_options"),
             "Creates the c10d backend of one group; blocks until all its ranks have come.");
  module.def("group_of_backend", &C10dBackend::group_of, py::arg("backend"),
             "The ProcessGroup behind a c10d backend of ours; None for others.");
  module.def("rendezvous", &find_place, py::arg("init_method"), py::arg("rank") = py::none(),
             py::arg("world_size") = py::none(), py::arg("timeout"),
             "(store, rank, world_size) from env://, tcp:// or file://.");
}

}  // namespace libddp
