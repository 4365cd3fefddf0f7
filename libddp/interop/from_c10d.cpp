#include "libddp/interop/from_c10d.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/interop/c10d_backend.h"
#include "libddp/interop/foreign_backend.h"
#include "libddp/interop/group_backend.h"
#include "libddp/rendezvous/torch_store.h"

namespace libddp {
namespace {

[[noreturn]] void refuse_source(const std::string& problem, const std::string& hint) {
  throw ArgumentError(fmt::format("libddp from_c10d: {}. Hint: {}.", problem, hint));
}

/// The backends of a group and the devices whose tensors each takes.
struct Served {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<c10::DeviceType> devices;
};

std::vector<Served> backends_of(const c10d::ProcessGroup& group) {
  std::vector<Served> found;
  for (const c10::Device& device : group.getDeviceTypes()) {
    c10::intrusive_ptr<c10d::Backend> backend;
    try {
      backend = const_cast<c10d::ProcessGroup&>(group).getBackend(device.type());
    } catch (const c10::Error& error) {
      refuse_source(fmt::format("group {} has no backend for {} ({})", group.getGroupName(),
                                device.str(), torch_error_text(error)),
                    "make it with one, as in backend=\"cpu:gloo,cuda:nccl\"");
    }
    const auto same = std::find_if(found.begin(), found.end(),
                                   [&](const Served& served) { return served.backend == backend; });
    if (same == found.end()) {
      found.push_back({std::move(backend), {device.type()}});
    } else {
      same->devices.push_back(device.type());
    }
  }
  return found;
}

Group over(c10::intrusive_ptr<c10d::Backend> backend, FromC10dOptions options,
           std::vector<c10::DeviceType> devices) {
  if (Group ours = C10dBackend::group_of(backend)) return ours;
  ProcessGroup::Options made;
  made.rank = backend->getRank();
  made.world_size = backend->getSize();
  made.name = options.name;
  made.global_ranks = std::move(options.global_ranks);
  if (const auto own = backend_options(*backend)) {
    made.timeout = own->timeout;
    if (made.name.empty()) made.name = own->group_name;
    if (made.global_ranks.empty()) {
      made.global_ranks.assign(own->global_ranks_in_group.begin(),
                               own->global_ranks_in_group.end());
    }
  }
  if (made.name.empty()) made.name = "c10d";
  if (options.timeout) made.timeout = *options.timeout;
  GroupIdentity identity{made.name, made.rank, made.world_size};
  return ProcessGroup::over(
      std::make_unique<ForeignBackend>(std::move(backend), std::move(identity),
                                       std::move(options.store), std::move(devices)),
      std::move(made));
}

}  // namespace

Group from_c10d(c10::intrusive_ptr<c10d::Backend> backend, FromC10dOptions options) {
  if (!backend) refuse_source("the backend is null", "pass a c10d::Backend that has been made");
  return over(std::move(backend), std::move(options), {});
}

Group from_c10d(const c10::intrusive_ptr<c10d::ProcessGroup>& group, FromC10dOptions options) {
  if (!group) refuse_source("the group is null", "pass a group that has been made");
  if (is_own_group(*group)) {
    return from_c10d(c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<GroupBackend>(group)),
                     std::move(options));
  }
  std::vector<Served> found = backends_of(*group);
  // That of the CPU is the group itself, another one stands beside it.
  std::stable_partition(found.begin(), found.end(), [](const Served& served) {
    return std::count(served.devices.begin(), served.devices.end(), c10::DeviceType::CPU) != 0;
  });
  if (found.empty()) {
    refuse_source(fmt::format("group {} has no backend", group->getGroupName()),
                  "make it with one, as in backend=\"cpu:gloo,cuda:nccl\"");
  }
  if (options.name.empty()) options.name = group->getGroupName();
  if (!options.store) options.store = group->getStore();
  Group result = over(found[0].backend, options, found[0].devices);
  if (found.size() > 1 && !result->has_device_backend() &&
      !C10dBackend::group_of(found[1].backend)) {
    result->use_for_devices(std::make_unique<ForeignBackend>(
        found[1].backend, GroupIdentity{result->name(), result->rank(), result->size()},
        options.store, found[1].devices));
  }
  return result;
}

}  // namespace libddp
