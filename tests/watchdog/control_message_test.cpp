// What ranks tell each other on the control sockets: whole, in order, also to who does not listen.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/watchdog/control_message.h"
#include "libddp/watchdog/control_outbox.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace libddp::test;

namespace {

struct SocketPair {
  SocketPair() {
    std::array<int, 2> fds{};
    expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) == 0, "socketpair");
    left.reset(fds[0]);
    right.reset(fds[1]);
  }
  UniqueFd left;
  UniqueFd right;
};

ControlMessage report(std::uint64_t number) {
  ControlMessage message{.kind = ControlMessage::Kind::Report, .number = number};
  message.failure.message = std::string(ControlMessage::kMaxText, 't');
  return message;
}

}  // namespace

TEST_CASE("control messages arrive whole and in order", "[control]") {
  SocketPair pair;
  ControlOutbox outbox;
  ControlMessage failure;
  failure.kind = ControlMessage::Kind::Failure;
  failure.failure = {GroupFailure::Kind::Timeout, std::string(5000, 'x'), 3, 4711};
  ControlMessage goodbye;
  goodbye.sequence = 42;
  REQUIRE(outbox.send(pair.left.get(), failure));
  REQUIRE(outbox.send(pair.left.get(), goodbye));
  ControlInbox inbox;
  const auto messages = inbox.take(pair.right.get());
  REQUIRE(messages.size() == 2);
  REQUIRE(messages[0].failure.kind == GroupFailure::Kind::Timeout);
  REQUIRE(messages[0].failure.message == std::string(ControlMessage::kMaxText, 'x'));
  REQUIRE(messages[0].failure.peer_rank == 3);
  REQUIRE(messages[0].failure.peer_pid == 4711);
  REQUIRE(messages[1].kind == ControlMessage::Kind::Goodbye);
  REQUIRE(messages[1].sequence == 42);
  REQUIRE_FALSE(inbox.is_closed());
  pair.left.reset();
  REQUIRE(inbox.take(pair.right.get()).empty());
  REQUIRE(inbox.is_closed());
}

TEST_CASE("control messages survive being cut", "[control]") {
  SocketPair whole;
  ControlOutbox outbox;
  ControlMessage message;
  message.kind = ControlMessage::Kind::Failure;
  message.failure.message = "reason";
  REQUIRE(outbox.send(whole.left.get(), message));
  std::array<char, 256> bytes{};
  const ssize_t size = ::recv(whole.right.get(), bytes.data(), bytes.size(), 0);
  REQUIRE(size > 10);
  SocketPair cut;
  ControlInbox inbox;
  for (ssize_t i = 0; i < size; ++i) {
    REQUIRE(::send(cut.left.get(), &bytes[static_cast<std::size_t>(i)], 1, 0) == 1);
    const auto messages = inbox.take(cut.right.get());
    REQUIRE(messages.size() == (i + 1 == size ? 1u : 0u));
  }
}

TEST_CASE("garbage on a control socket is recognised", "[control]") {
  SocketPair pair;
  const std::string garbage(64, 'g');
  REQUIRE(::send(pair.left.get(), garbage.data(), garbage.size(), 0) == 64);
  ControlInbox inbox;
  REQUIRE(inbox.take(pair.right.get()).empty());
  REQUIRE(inbox.is_garbled());
}

TEST_CASE("a peer that is gone takes no message and no signal", "[control]") {
  SocketPair pair;
  pair.right.reset();
  ControlOutbox outbox;
  REQUIRE_FALSE(outbox.send(pair.left.get(), {}));
  REQUIRE_FALSE(outbox.send(pair.left.get(), {}));
  REQUIRE(outbox.is_empty());
}

TEST_CASE("a peer that reads late gets whole messages, and how things stand", "[control]") {
  SocketPair pair;
  ControlOutbox outbox;
  constexpr std::uint64_t kMany = 500;  // a hundred times what the socket takes
  for (std::uint64_t i = 0; i < kMany; ++i) {
    if (i % 100 == 50) outbox.send(pair.left.get(), {.kind = ControlMessage::Kind::Retraction});
    REQUIRE(outbox.send(pair.left.get(), report(i)));
  }
  REQUIRE(outbox.send(pair.left.get(), {.kind = ControlMessage::Kind::Goodbye, .sequence = 42}));
  REQUIRE_FALSE(outbox.is_empty());
  ControlInbox inbox;
  std::vector<ControlMessage> messages;
  for (int turn = 0; turn < 1000 && (turn == 0 || !outbox.is_empty()); ++turn) {
    for (auto& each : inbox.take(pair.right.get())) messages.push_back(std::move(each));
    REQUIRE_FALSE(inbox.is_garbled());
    outbox.flush(pair.left.get());
  }
  for (auto& each : inbox.take(pair.right.get())) messages.push_back(std::move(each));
  REQUIRE(outbox.is_empty());
  REQUIRE(messages.size() > 2);
  REQUIRE(messages.size() < kMany);  // what waited was told in one
  REQUIRE(messages.back().kind == ControlMessage::Kind::Goodbye);
  REQUIRE(messages.back().sequence == 42);
  REQUIRE(messages[messages.size() - 2].number == kMany - 1);
}

TEST_CASE("a crowd of messages is read in linear time", "[control]") {
  SocketPair pair;
  std::string crowd;
  constexpr std::size_t kMany = 300'000;
  const std::string one = ControlMessage{.kind = ControlMessage::Kind::Heartbeat}.encode();
  for (std::size_t i = 0; i < kMany; ++i) crowd += one;
  std::thread writer([&] {
    for (std::size_t at = 0; at < crowd.size();) {
      const ssize_t sent =
          ::send(pair.left.get(), crowd.data() + at, crowd.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return;
      at += static_cast<std::size_t>(sent);
    }
  });
  // All of it lies in the inbox before the first message is taken out.
  const auto start = std::chrono::steady_clock::now();
  ControlInbox inbox;
  std::size_t count = 0;
  while (count < kMany && !inbox.is_garbled() && !inbox.is_closed()) {
    count += inbox.take(pair.right.get()).size();
  }
  writer.join();
  REQUIRE(count == kMany);
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("a peer's text cannot reach the terminal", "[control]") {
  SocketPair pair;
  ControlOutbox outbox;
  ControlMessage message{.kind = ControlMessage::Kind::Failure};
  message.failure.message = "why\n  \x1b]0;owned\a\xff";
  REQUIRE(outbox.send(pair.left.get(), message));
  ControlInbox inbox;
  const auto messages = inbox.take(pair.right.get());
  REQUIRE(messages.size() == 1);
  REQUIRE(messages[0].failure.message == "why\n  \\x1b]0;owned\\x07\\xff");
}
