// Survivors and newcomers meet again: with ranks and a launcher as processes.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/random.h"
#include "libddp/ddp/distributed_data_parallel.h"
#include "libddp/elastic/rejoin.h"
#include "libddp/transport/unix_socket.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr std::chrono::seconds kLimit{30};

/// What the launcher has of one worker.
class Line {
 public:
  explicit Line(UniqueFd socket) : socket_(std::move(socket)) { say(R"({"welcome": true})"); }

  void say(const std::string& text) {
    const std::string line = text + "\n";
    if (::send(socket_.get(), line.data(), line.size(), MSG_NOSIGNAL) < 0) {
      throw std::runtime_error("the worker is gone");
    }
  }
  /// Its next line; empty when it is gone.
  std::string hear() {
    while (buffer_.find('\n') == std::string::npos) {
      if (!wait_readable(socket_.get(), kLimit)) throw std::runtime_error("a worker is silent");
      char piece[512];
      const ssize_t count = ::recv(socket_.get(), piece, sizeof(piece), 0);
      if (count <= 0) return "";
      buffer_.append(piece, static_cast<std::size_t>(count));
    }
    const std::size_t end = buffer_.find('\n');
    const std::string line = buffer_.substr(0, end);
    buffer_.erase(0, end + 1);
    return line;
  }
  void go(int epoch, int rank, int port) {
    say(fmt::format(
        R"({{"go": {{"epoch": {0}, "restarts": {0}, "failure": "", "is_survivor": false,)"
        R"( "environment": {{"RANK": "{1}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",)"
        R"( "MASTER_PORT": "{2}"}}}}}})",
        epoch, rank, port));
  }

 private:
  UniqueFd socket_;
  std::string buffer_;
};

/// A free port of this host.
int free_port() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket.get(), name, length) != 0 || ::getsockname(socket.get(), name, &length) != 0) {
    throw std::runtime_error("no port");
  }
  return ::ntohs(address.sin_port);
}

float sum_of(const Group& group) {
  const at::Tensor sum = at::full({4}, group->rank() + 1.0);
  group->all_reduce(sum);
  return sum[0].item<float>();
}

/// The first rejoin of a process; its launcher may not listen yet.
Group join(std::chrono::milliseconds limit) {
  for (const Deadline deadline = Deadline::after(kLimit);;) {
    try {
      return rejoin(nullptr, limit);
    } catch (const TimeoutError&) {
      throw;
    } catch (const NetworkError&) {
      if (deadline.expired()) throw;
      ::usleep(10'000);
    }
  }
}

/// One step of a model that survivors keep over the epochs: the average of the ranks' numbers.
class Trainer {
 public:
  float step(const Group& group) {
    if (model_) {
      model_->rejoin(group);
    } else {
      model_ = std::make_unique<DistributedDataParallel<torch::nn::LinearImpl>>(net_, group);
    }
    model_->forward(at::full({1, 2}, group->rank() + 1.0)).sum().backward();
    return net_->weight.grad()[0][0].item<float>();
  }

 private:
  torch::nn::Linear net_{2, 1};
  std::unique_ptr<DistributedDataParallel<torch::nn::LinearImpl>> model_;
};

/// A program: in epoch 0 rank 1 is killed; in epoch 1 all wait for a message that nobody sends.
std::string train(const std::string& socket) {
  ::setenv("LIBDDP_IN_PLACE", socket.c_str(), 1);
  std::string told;
  int epoch = 0;
  Trainer trainer;
  try {
    for (Group group = join(kLimit);; group = rejoin(group, kLimit)) {
      try {
        told += fmt::format("{} of {} sum {} grad {}; ", group->rank(), group->size(),
                            sum_of(group), trainer.step(group));
        const bool is_first = ::getenv("EPOCH") == nullptr && epoch == 0;
        if (is_first && group->rank() == 1) ::kill(::getpid(), SIGKILL);
        group->recv(at::zeros({4}), 1 - group->rank());
      } catch (const Error& error) {
        if (!is_of_others(error)) throw;
        ++epoch;
      }
    }
  } catch (const StateError& error) {
    return told + error.what();
  }
}

std::string launch(const std::string& name) {
  UnixListener listener = UnixListener::open_as(name);  // a child of fork() has none of its parent
  const auto accept = [&] {
    UniqueFd socket = listener.accept(kLimit);
    if (!socket) throw std::runtime_error("nobody came");
    return Line(std::move(socket));
  };
  std::vector<Line> lines;
  for (int rank = 0; rank < 2; ++rank) lines.push_back(accept());
  int port = free_port();
  for (int rank = 0; rank < 2; ++rank) {
    if (lines[rank].hear() != R"({"ready":""})") throw std::runtime_error("it is not new");
    lines[rank].go(0, rank, port);
  }
  if (!lines[1].hear().empty()) throw std::runtime_error("rank 1 lives");
  const std::string why = lines[0].hear();
  const pid_t newcomer = ::fork();
  if (newcomer == 0) {
    ::setenv("EPOCH", "1", 1);
    const std::string told = train(listener.name());
    ::_exit(told.rfind("1 of 2 sum 3 grad 1.5; libddp: the launcher has ended the run", 0) == 0
                ? 0
                : 1);
  }
  lines[1] = accept();
  if (lines[1].hear() != R"({"ready":""})") throw std::runtime_error("it is not new");
  port = free_port();
  for (int rank = 0; rank < 2; ++rank) lines[rank].go(1, rank, port);
  ::usleep(300'000);  // both wait for a message by then; else they see it in the meeting
  for (Line& line : lines) line.say(R"({"leave": "a host comes"})");
  for (Line& line : lines) {
    const std::string left = line.hear();
    if (left.find("a host comes") == std::string::npos) throw std::runtime_error(left);
  }
  lines.clear();
  int status = -1;
  ::waitpid(newcomer, &status, 0);
  return fmt::format("{}; newcomer {}", why, status);
}

}  // namespace

TEST_CASE("a survivor and a newcomer meet in a new group", "[elastic][rejoin]") {
  const std::string name = "libddp-test-" + random_hex(8);
  const auto results =
      fork_ranks(3, [&](int process) { return process == 2 ? launch(name) : train(name); });
  CAPTURE(results[0].text, results[1].text, results[2].text);
  const int killed = results[0].signal == SIGKILL ? 0 : 1;
  REQUIRE(results[killed].signal == SIGKILL);
  const RankResult& survivor = results[1 - killed];
  REQUIRE(
      survivor.text.rfind(
          "0 of 2 sum 3 grad 1.5; 0 of 2 sum 3 grad 1.5; libddp: the launcher has ended the run",
          0) == 0);
  REQUIRE(results[2].text.find("rank 1 (pid ") != std::string::npos);
  REQUIRE(results[2].text.find("; newcomer 0") != std::string::npos);
}

TEST_CASE("rejoin says what it misses", "[elastic][rejoin]") {
  const std::string name = "libddp-test-" + random_hex(8);
  const auto results = fork_ranks(3, [&](int process) -> std::string {
    ::unsetenv("LIBDDP_IN_PLACE");
    if (process == 0) return message_of<StateError>([] { rejoin(nullptr); });
    if (process == 1) {
      ::setenv("LIBDDP_IN_PLACE", "libddp-test-nobody", 1);
      return message_of<NetworkError>([] { rejoin(nullptr); });
    }
    ::setenv("LIBDDP_IN_PLACE", name.c_str(), 1);
    const pid_t launcher = ::fork();
    if (launcher == 0) {
      UnixListener listener = UnixListener::open_as(name);
      Line line(listener.accept(kLimit));
      line.hear();
      ::pause();
    }
    const std::string told = message_of<TimeoutError>([] { join(std::chrono::milliseconds(300)); });
    ::kill(launcher, SIGKILL);
    ::waitpid(launcher, nullptr, 0);
    return told;
  });
  for (const RankResult& result : results) REQUIRE(result.ok());
  REQUIRE(results[0].text.find("no `libddp run --in-place` has started this process") !=
          std::string::npos);
  REQUIRE(results[1].text.find("LIBDDP_IN_PLACE=libddp-test-nobody, but no launcher is there") !=
          std::string::npos);
  REQUIRE(results[2].text.find("began no next epoch within the deadline") != std::string::npos);
}
