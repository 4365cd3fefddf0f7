#include "libddp/interop/from_c10d.h"

#include <fmt/format.h>

#include <utility>

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

}  // namespace

Group from_c10d(c10::intrusive_ptr<c10d::Backend> backend, FromC10dOptions options) {
  if (!backend) refuse_source("the backend is null", "pass a c10d::Backend that has been made");
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
  return ProcessGroup::over(std::make_unique<ForeignBackend>(
                                std::move(backend), std::move(identity), std::move(options.store)),
                            std::move(made));
}

Group from_c10d(const c10::intrusive_ptr<c10d::ProcessGroup>& group, FromC10dOptions options) {
  if (!group) refuse_source("the group is null", "pass a group that has been made");
  if (is_own_group(*group)) {
    return from_c10d(c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<GroupBackend>(group)),
                     std::move(options));
  }
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const c10::Error& error) {
    refuse_source(fmt::format("group {} has no backend for CPU tensors ({})", group->getGroupName(),
                              torch_error_text(error)),
                  "make it with one, as in backend=\"cpu:gloo,cuda:nccl\"");
  }
  if (options.name.empty()) options.name = group->getGroupName();
  if (!options.store) options.store = group->getStore();
  return from_c10d(std::move(backend), std::move(options));
}

}  // namespace libddp
