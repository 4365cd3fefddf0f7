#include "libddp/bootstrap/link_bootstrap.h"

#include <sys/socket.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/process.h"
#include "libddp/transport/network_interface.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::message_of;
using libddp::test::run_ranks;

namespace {

std::vector<GroupPeer> bootstrap_as(KeyValueStore& store, int rank,
                                    const std::vector<int>& host_of) {
  BootstrapOptions options;
  options.rank = rank;
  options.world_size = static_cast<int>(host_of.size());
  options.group_name = "test";
  options.host_identity = "host " + std::to_string(host_of[static_cast<std::size_t>(rank)]);
  return bootstrap(store, options, {}, Deadline::after(60s));
}

// Both ends of every connection say who they are.
void check_ends(const std::vector<GroupPeer>& peers, int own_rank) {
  const auto for_each = [&](auto call) {
    for (const GroupPeer& peer : peers) {
      if (peer.control) call(peer, peer.control.get());
      if (peer.messages) call(peer, peer.messages.get());
      for (const UniqueFd& link : peer.collectives) call(peer, link.get());
    }
  };
  const Deadline deadline = Deadline::after(60s);
  for_each([&](const GroupPeer&, int socket) {
    send_bytes(socket, &own_rank, sizeof(own_rank), deadline);
  });
  for_each([&](const GroupPeer& peer, int socket) {
    int theirs = -1;
    receive_bytes(socket, &theirs, sizeof(theirs), deadline);
    expect(theirs == peer.rank, "the connection leads to the right rank");
  });
}

std::string wait_for_key(KeyValueStore& store, const std::string& key) {
  const auto text = store.wait_get(key, Deadline::after(60s));
  expect(text.has_value(), "the key comes");
  return *text;
}

const std::vector<NetworkInterface> kInterfaces{{"lo", "127.0.0.1", false, true},
                                                {"eth0", "10.0.0.1", false, false},
                                                {"eth01", "10.0.1.1", false, false},
                                                {"docker0", "172.17.0.1", false, false}};

std::string names_of(const std::string& value) {
  std::string names;
  for (const auto& each : matching_interfaces(kInterfaces, "NCCL_SOCKET_IFNAME", value)) {
    names += each.name + " ";
  }
  return names;
}

}  // namespace

TEST_CASE("Ranks of several hosts are joined by TCP") {
  const std::vector<int> host_of{0, 0, 1, 1, 1};
  InMemoryStore store;
  run_ranks(5, [&](int rank) {
    const std::vector<GroupPeer> peers = bootstrap_as(store, rank, host_of);
    const HostLayout layout = HostLayout::from_keys({"a", "a", "b", "b", "b"});
    for (const GroupPeer& peer : peers) {
      const bool is_remote = !layout.is_local(peer.rank, rank);
      const int index = layout.index(rank);
      const bool are_leaders = is_remote && index < 2 && layout.index(peer.rank) == index;
      expect(peer.host_index == layout.host(peer.rank), "its host");
      expect(static_cast<bool>(peer.control) == (peer.rank != rank), "control to all others");
      expect(static_cast<bool>(peer.messages) == is_remote, "messages between hosts");
      expect(peer.collectives.size() == (are_leaders ? 2u : 0u), "leaders of one number");
    }
    check_ends(peers, rank);
  });
}

TEST_CASE("Strangers do no harm") {
  InMemoryStore store;
  run_ranks(2, [&](int rank) {
    std::vector<UniqueFd> strangers;
    if (rank == 1) {
      // Rank 0 listens once both descriptions are there; the real rank 1 comes after the strangers.
      std::thread real;
      const std::vector<int> host_of{0, 1};
      std::vector<GroupPeer> peers;
      real = std::thread([&] { peers = bootstrap_as(store, 1, host_of); });
      const LinkAddress address = LinkAddress::decode(wait_for_key(store, "link/0"));
      for (int i = 0; i < 20; ++i) {
        try {
          strangers.push_back(connect_tcp(address.endpoint, Deadline::after(5s)));
          LinkRequest request = LinkRequest::make({0, LinkKind::Control, 0}, 1);
          const std::size_t bytes = i % 3 == 0 ? 5 : sizeof(request);
          if (i % 3 == 1) request.magic = 1;
          send_bytes(strangers.back().get(), &request, bytes, Deadline::after(5s));
        } catch (const NetworkError&) {
          break;  // all have met, and nobody listens any more
        }
      }
      real.join();
      return check_ends(peers, 1);
    }
    check_ends(bootstrap_as(store, 0, {0, 1}), 0);
  });
}

TEST_CASE("Interfaces by name") {
  REQUIRE(names_of("eth") == "eth0 eth01 ");
  REQUIRE(names_of("eth0") == "eth0 eth01 ");
  REQUIRE(names_of("eth01,eth0") == "eth01 eth0 ");
  REQUIRE(names_of("=eth0") == "eth0 ");
  REQUIRE(names_of("^docker,lo") == "eth0 eth01 ");
  REQUIRE(names_of("^=eth0") == "lo eth01 docker0 ");
  std::string text;
  try {
    names_of("ib");
  } catch (const ArgumentError& error) {
    text = error.what();
  }
  REQUIRE(text.find("NCCL_SOCKET_IFNAME='ib' fits no network interface") != std::string::npos);
  REQUIRE(text.find("eth0 (10.0.0.1)") != std::string::npos);
}

TEST_CASE("The address for other hosts is one that they can reach") {
  const NetworkInterface lo{"lo", "127.0.0.1", false, true};
  const NetworkInterface docker{"docker0", "172.17.0.1"};
  const NetworkInterface eth{"eth0", "10.0.0.1"};
  const NetworkInterface ib{"ib0", "10.1.0.1"};
  NetworkInterface unplugged{"eth7", "10.7.0.1"};
  unplugged.is_running = false;
  NetworkInterface local{"eth8", "fe80::8", true};
  local.is_link_local = true;
  const auto chosen = [](const HostNetwork& network) {
    return choose_among(network, false).address;
  };
  // On the route to the store, whatever it is.
  REQUIRE(chosen({{lo, docker, eth, ib}, {"10.1.0.1"}, {"eth0"}}) == "10.1.0.1");
  REQUIRE(chosen({{lo, docker, eth}, {"172.17.0.1"}, {"eth0"}}) == "172.17.0.1");
  // A store on this host, or a name that /etc/hosts maps to 127.0.1.1: the default route's.
  REQUIRE(chosen({{lo, docker, eth, ib}, {"127.0.0.1"}, {"ib0", "eth0"}}) == "10.1.0.1");
  // Without one: no bridge of containers, no interface without a cable.
  REQUIRE(chosen({{lo, unplugged, docker, local, eth}, {"127.0.0.1"}, {}}) == "10.0.0.1");
  REQUIRE(chosen({{lo, unplugged, docker}, {}, {"eth7"}}) == "172.17.0.1");
  // Loopback leads nowhere.
  const std::string text = message_of<NetworkError>([&] {
    chosen({{lo, unplugged, local}, {"127.0.0.1"}, {}});
  });
  REQUIRE(contains(text, "no address at which other hosts could reach it"));
  REQUIRE(contains(text,
                   "lo (127.0.0.1, loopback), eth7 (10.7.0.1, no carrier), "
                   "eth8 (fe80::8, link-local)"));
  REQUIRE(choose_among({{lo, local}, {}, {}}, true).address == "127.0.0.1");
}

TEST_CASE("LIBDDP_HOST_ID tells clones of one machine apart") {
  ::setenv("LIBDDP_HOST_ID", "clone-a", 1);
  const std::string own = machine_id();
  ::unsetenv("LIBDDP_HOST_ID");
  REQUIRE(own != machine_id());
  REQUIRE(contains(own, "clone-a"));
  REQUIRE(machine_id() == boot_id());
}

TEST_CASE("Own interfaces") {
  REQUIRE_FALSE(network_interfaces().empty());
  REQUIRE_FALSE(choose_interface("", Deadline::after(60s), true).address.empty());
}

TEST_CASE("Hosts by the order of their lowest ranks") {
  const HostLayout layout = HostLayout::from_keys({"b", "a", "b", "b"});
  REQUIRE(layout.num_hosts() == 2);
  REQUIRE(layout.ranks_of(0) == std::vector<int>{0, 2, 3});
  REQUIRE(layout.index(3) == 2);
  REQUIRE(layout.num_leaders() == 1);
  REQUIRE_FALSE(layout.is_even());
}

TEST_CASE("IPv6 between hosts") {
  const auto known = network_interfaces();
  for (const NetworkInterface& each : known) {
    if (!each.is_ipv6) continue;
    TcpListener listener = TcpListener::open(each.address);
    const Deadline deadline = Deadline::after(5s);
    const UniqueFd theirs = connect_tcp(listener.endpoint(), deadline);
    UniqueFd mine;
    while (!mine && !deadline.expired()) mine = listener.accept();
    send_bytes(theirs.get(), "hi", 2, deadline);
    char text[3] = {};
    receive_bytes(mine.get(), text, 2, deadline);
    REQUIRE(std::string(text) == "hi");
    REQUIRE(listener.endpoint().to_string().front() == '[');
    return;
  }
}
