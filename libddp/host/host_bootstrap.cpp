#include "libddp/host/host_bootstrap.h"

#include <fmt/format.h>

#include <functional>
#include <thread>
#include <utility>

#include "libddp/base/build_info.h"
#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/collectives/comm_assembly.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/group/operand.h"
#include "libddp/host/host_backend.h"
#include "libddp/host/inter_stage_factory.h"
#include "libddp/host/living_groups.h"
#include "libddp/rendezvous/torch_store.h"
#include "libddp/transport/link_settings.h"
#include "libddp/transport/network_interface.h"
#include "libddp/watchdog/heartbeat_monitor.h"

namespace libddp {
namespace {

const BackendRegistration registration(c10::kCPU, &create_host_backend);

/// What a rank brings to the bootstrap itself.
struct OwnParts {
  LinkSettings link;
  SharedSegment page;
  std::shared_ptr<Arena> arena;
};

LinkSettings link_settings(const LinkOptions& chosen) {
  std::optional<Dtype> dtype;
  if (chosen.wire_dtype) {
    dtype = wire_dtype(*chosen.wire_dtype);
    if (!dtype || c10::isComplexType(*chosen.wire_dtype)) {
      throw ArgumentError(fmt::format(
          "libddp: wire_dtype={} is neither float32 nor bfloat16. Hint: bfloat16 halves the bytes "
          "of float32 sums between hosts.",
          c10::toString(*chosen.wire_dtype)));
    }
  }
  return LinkSettings::chosen(chosen.sockets_per_link, dtype);
}

BootstrapOptions bootstrap_options(const GroupIdentity& identity, const BackendRequest& request) {
  BootstrapOptions options;
  options.rank = identity.rank;
  options.world_size = identity.world_size;
  options.group_name = identity.name;
  options.note = ShmComm::own_cpu_mask();
  options.route_to = store_host(request.store);
  options.host_identity = request.options.host_identity;
  return options;
}

/// Reads whatever the user has set, so that what cannot be read is known before the bootstrap.
OwnParts prepare(const GroupIdentity& identity, const ProcessGroup::Options& chosen,
                 BootstrapOptions& options) {
  options.key = given_run_key();
  options.require_key = chosen.require_key || is_run_key_required();
  heartbeat_timeout();
  OwnParts own;
  own.link = link_settings(chosen.links);
  options.sockets_per_link = own.link.sockets_per_link;
  options.agreement = fmt::format("libddp {}, {}, {} inter={}", version(), ShmComm::layout(),
                                  own.link.to_text(), chosen.inter ? "an engine" : "none");
  own.page = ShmComm::create_page(identity.name, identity.world_size);
  own.arena = Arena::create(identity.name, Arena::default_reserve_bytes(identity.world_size));
  return own;
}

std::vector<GroupPeer> bootstrap_all(KeyValueStore& store, const BootstrapOptions& options,
                                     const OwnParts& own, Deadline deadline) {
  std::vector<GroupPeer> peers =
      bootstrap(store, options, descriptors_of(own.page, *own.arena), deadline);
  // All peers have read them; a later group of the same name on this store starts clean.
  store.remove(fmt::format("peer/{}", options.rank));
  store.remove(fmt::format("claim/{}", options.rank));
  store.remove(fmt::format("link/{}", options.rank));
  if (options.key) store.remove(fmt::format("join/{}", options.rank));
  return peers;
}

/// Empty without a factory. `identity` and `request` must outlive the maker.
InterStageMaker stage_maker(const GroupIdentity& identity, const BackendRequest& request,
                            const BootstrapOptions& options, Deadline deadline) {
  if (!request.options.inter) return nullptr;
  return [&identity, &request, &options, deadline](ShmComm& local, InterPlace place,
                                                   std::unique_ptr<InterStage> links) {
    const bool is_simulated = !options.host_identity.empty();
    return request.options.inter->make(
        local, place, std::move(links),
        {.identity = identity,
         .store = request.store,
         .prefix = request.prefix,
         .address = choose_interface(options.route_to, deadline, is_simulated).address,
         .deadline = deadline,
         .timeout = request.options.timeout});
  };
}

std::chrono::milliseconds join_timeout(const BackendRequest& request) {
  return request.options.join_timeout.value_or(request.options.timeout);
}

std::unique_ptr<HostBackend> join_ranks(KeyValueStore& store, const GroupIdentity& identity,
                                        const BackendRequest& request,
                                        const std::function<void()>& look) {
  const Deadline deadline = Deadline::after(join_timeout(request));
  BootstrapOptions options = bootstrap_options(identity, request);
  options.look = look;
  OwnParts own;
  try {
    own = prepare(identity, request.options, options);
  } catch (const Error& error) {
    refuse_bootstrap(store, options, error.what());
    throw;
  }
  std::vector<GroupPeer> peers = bootstrap_all(store, options, own, deadline);

  const std::shared_ptr<Arena> arena = own.arena;
  std::unique_ptr<Comm> comm =
      assemble_comm({.rank = identity.rank,
                     .group_name = identity.name,
                     .arena = arena,
                     .page = std::move(own.page),
                     .link = own.link,
                     .make_stage = stage_maker(identity, request, options, deadline)},
                    peers);
  auto backend = std::make_unique<HostBackend>(identity, arena, std::move(comm), std::move(peers));
  // Nobody returns before everyone has met: the store may end with rank 0.
  const auto left = deadline.remaining(join_timeout(request));
  backend->wait_for_all(std::chrono::ceil<std::chrono::milliseconds>(left) +
                        std::chrono::milliseconds(1));
  return backend;
}

}  // namespace

std::unique_ptr<Backend> create_host_backend(const BackendRequest& request) {
  constexpr std::chrono::milliseconds kTimeToRead{500};
  const GroupIdentity identity{request.options.name, request.options.rank,
                               request.options.world_size};
  const void* const bare = bare_store(request.store).get();
  const LossWatch others(bare, request.options.global_ranks);
  const auto look = [&] {
    others.throw_if_lost(identity.where() + " create");
    if (request.options.look) request.options.look();
  };
  TorchStore keys(request.store, request.prefix,
                  {.deadline = Deadline::after(join_timeout(request)), .look = look});
  try {
    std::unique_ptr<HostBackend> backend = join_ranks(keys, identity, request, look);
    backend->join_living(bare, request.options.global_ranks);
    return backend;
  } catch (const Error&) {
    // The others read in the store why a bootstrap failed, and rank 0 often holds the store: it
    // stays for a moment, so that they do not lose the store instead of learning the cause.
    if (identity.rank == 0 && identity.world_size > 1) std::this_thread::sleep_for(kTimeToRead);
    throw;
  }
}

}  // namespace libddp
