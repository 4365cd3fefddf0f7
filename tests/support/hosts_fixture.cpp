#include "tests/support/hosts_fixture.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "libddp/collectives/comm_assembly.h"
#include "libddp/collectives/shm_comm.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {
namespace {

constexpr std::chrono::seconds kPatience{60};

HostsRank join_hosts(KeyValueStore& store, int rank, const std::vector<int>& host_of,
                     const LinkSettings& link, const InterStageMaker& make_stage) {
  HostsRank me;
  me.rank = rank;
  me.world_size = static_cast<int>(host_of.size());
  me.arena = Arena::create("test", 256u << 20);
  SharedSegment page = ShmComm::create_page("test", me.world_size);
  BootstrapOptions options;
  options.rank = rank;
  options.world_size = me.world_size;
  options.group_name = "test";
  options.note = ShmComm::own_cpu_mask();
  options.agreement = link.to_text();
  options.sockets_per_link = link.sockets_per_link;
  options.host_identity = "host " + std::to_string(host_of[static_cast<std::size_t>(rank)]);
  me.peers = bootstrap(store, options, descriptors_of(page, *me.arena), Deadline::after(kPatience));
  me.comm = assemble_comm({rank, "test", me.arena, std::move(page), link, make_stage}, me.peers);
  return me;
}

}  // namespace

void run_hosts(const std::vector<int>& host_of, const std::function<void(HostsRank&)>& f,
               const LinkSettings& link, const InterStageMaker& make_stage) {
  InMemoryStore store;
  std::vector<HostsRank> ranks(host_of.size());
  const int world_size = static_cast<int>(host_of.size());
  run_ranks(world_size, [&](int rank) {
    ranks[static_cast<std::size_t>(rank)] = join_hosts(store, rank, host_of, link, make_stage);
  });
  // The communicators live until all ranks are through: nobody leaves in the middle of another's
  // call.
  run_ranks(world_size, [&](int rank) { f(ranks[static_cast<std::size_t>(rank)]); });
}

void run_transfers(Comm& comm, std::vector<Comm::Transfer>& transfers) {
  const Deadline deadline = Deadline::after(kPatience);
  std::vector<Comm::Transfer*> parts;
  for (Comm::Transfer& transfer : transfers) parts.push_back(&transfer);
  while (!parts.empty()) {
    const std::uint32_t ticket = comm.mail_ticket();
    const bool moved = comm.progress(parts);
    std::erase_if(parts, [](const Comm::Transfer* part) { return part->is_done; });
    expect(!deadline.expired(), "the transfers end in time");
    // Nobody watches the network here, so the waits are short.
    if (!moved && !parts.empty()) comm.wait_for_mail(ticket, std::chrono::milliseconds(1));
  }
}

}  // namespace libddp::test
