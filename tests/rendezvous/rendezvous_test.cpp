// From environment, URL or store to a group; every bad input names itself at once.

#include <ATen/ops/full.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "libddp/base/unique_fd.h"
#include "libddp/group/init_process_group.h"
#include "libddp/rendezvous/rendezvous.h"
#include "tests/support/catch.h"
#include "tests/support/require_parts.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

const std::vector<std::string> kVariables = {"RANK",
                                             "WORLD_SIZE",
                                             "MASTER_ADDR",
                                             "MASTER_PORT",
                                             "TORCHELASTIC_USE_AGENT_STORE",
                                             "TORCHELASTIC_RESTART_COUNT"};

/// Sets exactly these of the variables above; puts the old ones back.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& values) {
    for (const std::string& variable : kVariables) {
      if (const char* value = ::getenv(variable.c_str())) before_[variable] = value;
      ::unsetenv(variable.c_str());
    }
    for (const auto& [variable, value] : values) ::setenv(variable.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const std::string& variable : kVariables) ::unsetenv(variable.c_str());
    for (const auto& [variable, value] : before_) ::setenv(variable.c_str(), value.c_str(), 1);
  }

 private:
  std::map<std::string, std::string> before_;
};

/// A port of this machine. It stays bound, so that nobody else is given it; a server that sets
/// SO_REUSEADDR can listen on it all the same.
class Port {
 public:
  explicit Port(bool listens = false) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = listens ? htonl(INADDR_ANY) : htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    expect(::bind(socket_.get(), generic, size) == 0, "bind");
    expect(::getsockname(socket_.get(), generic, &size) == 0, "getsockname");
    if (listens) expect(::listen(socket_.get(), 8) == 0, "listen");
    number_ = ntohs(address.sin_port);
  }

  std::string text() const { return std::to_string(number_); }
  std::string url() const { return "tcp://127.0.0.1:" + text(); }

 private:
  UniqueFd socket_;
  std::uint16_t number_ = 0;
};

void expect_sum(const Group& group) {
  at::Tensor tensor = at::full({4}, group->rank() + 1.0f, at::kFloat);
  group->all_reduce(tensor);
  const int p = group->size();
  expect(tensor[0].item<float>() == static_cast<float>(p * (p + 1)) / 2, "sum");
}

std::string refusal(const InitOptions& options) {
  return message_of<ArgumentError>([&] { init_process_group(options); });
}

}  // namespace

TEST_CASE("one rank needs no master", "[rendezvous]") {
  Environment environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  const Group group = init_process_group();
  REQUIRE(group->size() == 1);
  REQUIRE(group->name() == "world");
  expect_sum(group);
  group->shutdown();
}

TEST_CASE("ranks meet at the address in the environment", "[rendezvous]") {
  const Port port;
  Environment environment({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port.text()}});
  run_ranks(3, [&](int rank) {
    const Group group = init_process_group({.rank = rank, .world_size = 3});
    expect_sum(group);
    group->shutdown();
  });
}

TEST_CASE("processes meet at the address in the environment", "[rendezvous]") {
  const Port port;
  const auto results = fork_ranks(2, [&](int rank) -> std::string {
    Environment environment({{"RANK", std::to_string(rank)},
                             {"WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "localhost"},
                             {"MASTER_PORT", port.text()}});
    const Group group = init_process_group({.timeout = std::chrono::seconds(60)});
    expect(group->rank() == rank, "rank");
    expect_sum(group);
    group->shutdown();
    return "";
  });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
}

TEST_CASE("under torchrun all ranks are clients of the agent's store", "[rendezvous]") {
  // The agent chooses the port: it listens before the ranks start.
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  Environment environment({{"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", std::to_string(agent->getPort())},
                           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                           {"TORCHELASTIC_RESTART_COUNT", "2"}});
  c10d::Store& store = *agent;
  store.set("/worker/attempt_2/mine", std::string("seen"));
  run_ranks(2, [&](int rank) {
    const Rendezvous found = rendezvous({.rank = rank, .world_size = 2});
    expect(found.store->get_to_str("mine") == "seen", "prefix of the attempt");
    const Group group = init_process_group({.rank = rank, .world_size = 2});
    expect_sum(group);
    group->shutdown();
  });
}

TEST_CASE("ranks meet at a tcp address", "[rendezvous]") {
  const Port port;
  run_ranks(2, [&](int rank) {
    const std::string query = "?rank=" + std::to_string(rank) + "&world_size=2";
    const Group group = init_process_group({.init_method = port.url() + query});
    expect_sum(group);
    group->shutdown();
  });
}

TEST_CASE("a rank that comes back to the address before rank 0 waits for the next store",
          "[rendezvous]") {
  const Port port;
  const auto results = fork_ranks(2, [&](int rank) -> std::string {
    for (int round = 0; round < 6; ++round) {
      const Group group = init_process_group({.init_method = port.url(),
                                              .rank = rank,
                                              .world_size = 2,
                                              .timeout = std::chrono::seconds(60)});
      expect_sum(group);
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      group->shutdown();
    }
    return "";
  });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
  }
}

TEST_CASE("ranks meet through a file, which is gone afterwards", "[rendezvous]") {
  TemporaryFolder folder;
  for (int round = 0; round < 10; ++round) {
    run_ranks(3, [&](int rank) {
      const Group group = init_process_group({.init_method = "file://" + folder.path() + "/store",
                                              .rank = rank,
                                              .world_size = 3,
                                              .timeout = std::chrono::seconds(60)});
      expect_sum(group);
      group->shutdown();
    });
    REQUIRE(list_folder(folder.path()) == std::set<std::string>());
  }
}

TEST_CASE("ranks meet through a given store", "[rendezvous]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](int rank) {
    const Group group = init_process_group(
        {.backend = "cpu:gloo,cuda:nccl", .rank = rank, .world_size = 2, .store = store});
    expect_sum(group);
    group->shutdown();
  });
  require_parts(refusal({.rank = 0, .store = store}), {"without world_size"});
  require_parts(refusal({.world_size = 1, .store = store}), {"without rank"});
  require_parts(refusal({.rank = 3, .world_size = 2, .store = store}),
                {"argument rank=3 contradicts argument world_size=2", "ranks are 0 to 1"});
}

TEST_CASE("bad environments are refused by name and value", "[rendezvous]") {
  using Values = std::map<std::string, std::string>;
  const auto refused = [](const Values& values, const std::vector<std::string>& parts) {
    Environment environment(values);
    require_parts(refusal({.timeout = std::chrono::seconds(5)}), parts);
  };
  const Values good{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}};
  const auto with = [&](const std::string& variable, const std::string& value) {
    Values values = good;
    values[variable] = value;
    return values;
  };
  refused({}, {"environment variable RANK is not set", "torchrun"});
  refused(with("RANK", ""), {"environment variable RANK is not set"});
  refused(with("WORLD_SIZE", ""), {"environment variable WORLD_SIZE is not set"});
  refused(with("MASTER_ADDR", ""), {"environment variable MASTER_ADDR is not set"});
  refused(with("MASTER_PORT", ""), {"environment variable MASTER_PORT is not set"});
  refused(with("RANK", "first"), {"RANK='first' is not an integer"});
  refused(with("RANK", "-1"), {"RANK='-1'"});
  refused(with("RANK", "1e9"), {"RANK='1e9'"});
  refused(with("RANK", "99999999999999999999"), {"RANK='99999999999999999999'"});
  refused(with("RANK", "2"), {"RANK=2 contradicts WORLD_SIZE=2: ranks are 0 to 1"});
  refused(with("WORLD_SIZE", "0"), {"WORLD_SIZE='0'"});
  refused(with("WORLD_SIZE", "two"), {"WORLD_SIZE='two'"});
  refused(with("MASTER_PORT", "0"), {"MASTER_PORT='0' is not an integer from 1 to 65535"});
  refused(with("MASTER_PORT", "70000"), {"MASTER_PORT='70000'"});
  refused(with("MASTER_PORT", "29500 "), {"MASTER_PORT='29500 '"});
  refused(with("MASTER_ADDR", "tcp://localhost"), {"MASTER_ADDR='tcp://localhost' is not a host"});
  refused(with("MASTER_ADDR", "my host"), {"MASTER_ADDR='my host' is not a host"});
  refused(with("TORCHELASTIC_USE_AGENT_STORE", "maybe"), {"TORCHELASTIC_USE_AGENT_STORE='maybe'"});
  refused({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "x"}}, {"MASTER_PORT='x'"});
}

TEST_CASE("bad urls and arguments are refused", "[rendezvous]") {
  const auto refused = [](const std::string& url, const std::vector<std::string>& parts) {
    require_parts(refusal({.init_method = url, .timeout = std::chrono::seconds(5)}), parts);
  };
  refused("http://localhost:1", {"init_method 'http://localhost:1'", "none of env://"});
  refused("localhost:1", {"none of env://, tcp:// and file://"});
  refused("tcp://localhost?rank=0&world_size=2", {"it has no port"});
  refused("tcp://:12?rank=0&world_size=2", {"it has no host"});
  refused("tcp://localhost:port?rank=0&world_size=2", {"port 'port' is not a number"});
  refused("tcp://localhost:0?rank=0&world_size=2", {"port '0'"});
  refused("tcp://localhost:12", {"rank is given neither"});
  refused("tcp://localhost:12?rank=0", {"world_size is given neither"});
  refused("tcp://localhost:12?rank=x&world_size=2", {"rank='x' is not a number"});
  refused("tcp://localhost:12?rank=2&world_size=2", {"rank=2 contradicts world_size=2"});
  refused("tcp://localhost:12?rank=0&rank=1&world_size=2", {"rank is given twice"});
  refused("tcp://localhost:12?size=2", {"'size=2' is neither"});
  refused("file://relative?rank=0&world_size=1", {"it has no absolute path"});
  refused("file:///no/such/folder/store?rank=0&world_size=1",
          {"cannot write in folder /no/such/folder", "No such file"});
  require_parts(refusal({.init_method = "tcp://localhost:12?rank=0&world_size=2", .rank = 1}),
                {"it says rank=0, but the argument rank=1"});
  require_parts(refusal({.timeout = std::chrono::milliseconds(0)}), {"timeout of 0 ms"});
  require_parts(refusal({.backend = "mpi"}), {"backend 'mpi'", "'mpi' is not known"});
  require_parts(refusal({.backend = "nccl"}), {"backend 'nccl'", "no CUDA"});
  require_parts(refusal({.backend = "cuda:nccl"}), {"nothing for CPU tensors"});
}

TEST_CASE("a port in use is named by rank 0, and others end in time", "[rendezvous]") {
  const Port taken(true);
  const auto start = std::chrono::steady_clock::now();
  const auto results = fork_ranks(2, [&](int rank) -> std::string {
    const InitOptions options{.init_method = taken.url(),
                              .rank = rank,
                              .world_size = 2,
                              .timeout = std::chrono::seconds(1)};
    if (rank == 0) return message_of<NetworkError>([&] { init_process_group(options); });
    return message_of<TimeoutError>([&] { init_process_group(options); });
  });
  require_parts(results[0].text, {"cannot listen on port " + taken.text(), "address already in use",
                                  "choose another MASTER_PORT"});
  require_parts(results[1].text, {"127.0.0.1:" + taken.text() + " does not answer as a store"});
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(40));
}

TEST_CASE("a master that is not there is named in time", "[rendezvous]") {
  const Port silent;
  const auto start = std::chrono::steady_clock::now();
  const std::string text = message_of<TimeoutError>([&] {
    init_process_group({.init_method = silent.url() + "?rank=1&world_size=2",
                        .timeout = std::chrono::milliseconds(300)});
  });
  require_parts(text, {"rank 1 could not reach the store at 127.0.0.1:" + silent.text(),
                       "within 0.3 s", "Connection refused"});
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("a rank that never comes is named", "[rendezvous]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](int rank) {
    const std::string text = message_of<TimeoutError>([&] {
      init_process_group({.rank = rank,
                          .world_size = 4,
                          .timeout = std::chrono::milliseconds(300),
                          .store = store});
    });
    expect(contains(text, "rank 2 (never came), rank 3 (never came)"), text);
  });
}

TEST_CASE("two processes with one rank are an error for all", "[rendezvous]") {
  TemporaryFolder folder;
  const auto results = fork_ranks(3, [&](int process) -> std::string {
    const int rank = process == 2 ? 1 : process;
    return message_of<PeerError>([&] {
      init_process_group({.init_method = "file://" + folder.path() + "/store",
                          .rank = rank,
                          .world_size = 3,
                          .timeout = std::chrono::seconds(30)});
    });
  });
  for (const RankResult& result : results) {
    INFO(result.text);
    REQUIRE(result.ok());
    REQUIRE(contains(result.text, "two processes call themselves rank 1"));
  }
}
