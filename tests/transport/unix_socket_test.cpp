#include "libddp/transport/unix_socket.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/parent_only.h"
#include "libddp/transport/frame.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/run_ranks.h"
#include "tests/support/soon.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::message_of;
using libddp::test::soon;

namespace {

struct Pair {
  Pair() {
    UnixListener listener = UnixListener::open();
    one = connect_unix(listener.name(), soon());
    other = listener.accept(60s);
    REQUIRE(other);
  }

  UniqueFd one;
  UniqueFd other;
};

bool are_same_file(int one, int other) {
  const std::string base = "/proc/self/fd/";
  char first[256] = {};
  char second[256] = {};
  return ::readlink((base + std::to_string(one)).c_str(), first, 255) > 0 &&
         ::readlink((base + std::to_string(other)).c_str(), second, 255) > 0 &&
         std::strcmp(first, second) == 0;
}

}  // namespace

TEST_CASE("A listener is abstract, unique and closed on exec") {
  const UnixListener one = UnixListener::open();
  const UnixListener other = UnixListener::open();
  REQUIRE(one.name() != other.name());
  REQUIRE((::fcntl(one.fd(), F_GETFD) & FD_CLOEXEC) != 0);
  std::ifstream list("/proc/net/unix");
  const std::string text((std::istreambuf_iterator<char>(list)), {});
  REQUIRE(contains(text, "@" + one.name()));
}

TEST_CASE("accept gives nothing when nobody comes") {
  UnixListener listener = UnixListener::open();
  REQUIRE_FALSE(listener.accept(0ms));
  REQUIRE_FALSE(listener.accept(5ms));
}

TEST_CASE("Connecting to nobody is a NetworkError") {
  REQUIRE(contains(message_of<NetworkError>([] { connect_unix("libddp-nobody", soon()); }),
                   "connect: Connection refused"));
  REQUIRE_THROWS_AS(connect_unix("", soon()), NetworkError);
  REQUIRE_THROWS_AS(connect_unix(std::string(200, 'x'), soon()), NetworkError);
}

TEST_CASE("The peer is known to the kernel") {
  const Pair pair;
  REQUIRE(peer_credentials(pair.one.get()).pid == ::getpid());
  REQUIRE(peer_credentials(pair.other.get()).uid == ::geteuid());
}

TEST_CASE("Frames carry bytes and descriptors both ways") {
  const Pair pair;
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  send_frame(pair.one.get(), "first", {reader.get(), writer.get()}, soon());
  send_frame(pair.one.get(), "", {}, soon());
  send_frame(pair.one.get(), std::string("zero\0inside", 11), {writer.get()}, soon());
  send_frame(pair.other.get(), "back", {}, soon());

  const Frame first = receive_frame(pair.other.get(), FrameLimits{}, soon());
  REQUIRE(first.bytes == "first");
  REQUIRE(first.descriptors.size() == 2);
  REQUIRE(are_same_file(first.descriptors[1].get(), writer.get()));
  REQUIRE((::fcntl(first.descriptors[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
  REQUIRE(receive_frame(pair.other.get(), FrameLimits{}, soon()).bytes.empty());
  const Frame third = receive_frame(pair.other.get(), FrameLimits{}, soon());
  REQUIRE(third.bytes == std::string("zero\0inside", 11));
  REQUIRE(third.descriptors.size() == 1);
  REQUIRE(receive_frame(pair.one.get(), FrameLimits{}, soon()).bytes == "back");
}

TEST_CASE("A frame larger than the socket's buffer passes in pieces") {
  const Pair pair;
  const std::string large(4u << 20, 'x');
  libddp::test::run_ranks(2, [&](int rank) {
    if (rank == 0) {
      send_frame(pair.one.get(), large, {pair.one.get()}, soon());
      return;
    }
    const FrameLimits limits{.max_bytes = large.size(), .max_descriptors = 1};
    const Frame frame = receive_frame(pair.other.get(), limits, soon());
    expect(frame.bytes == large && frame.descriptors.size() == 1, "all bytes and the descriptor");
  });
}

TEST_CASE("Frames that break the limits are refused") {
  const Pair pair;
  const auto receive = [&](FrameLimits limits) {
    return message_of<NetworkError>([&] { receive_frame(pair.other.get(), limits, soon()); });
  };
  SECTION("too many bytes") {
    send_frame(pair.one.get(), "0123456789", {}, soon());
    REQUIRE(contains(receive({.max_bytes = 9}), "sent 10 bytes"));
  }
  SECTION("too many descriptors") {
    send_frame(pair.one.get(), "", {pair.one.get(), pair.one.get()}, soon());
    REQUIRE(contains(receive({.max_descriptors = 1}), "and 2 descriptors, at most"));
  }
  SECTION("no frame at all") {
    REQUIRE(::send(pair.one.get(), "GET / HTTP/1.1\r\n", 16, 0) == 16);
    REQUIRE(contains(receive({}), "something else than a message"));
  }
  SECTION("the end in the middle") {
    REQUIRE(::send(pair.one.get(), "lddp\x05", 5, 0) == 5);
    REQUIRE(::shutdown(pair.one.get(), SHUT_WR) == 0);
    REQUIRE(contains(receive({}), "connection was closed"));
  }
}

TEST_CASE("Deadlines end sending and receiving") {
  const Pair pair;
  REQUIRE_THROWS_AS(receive_frame(pair.one.get(), FrameLimits{}, Deadline::after(10ms)),
                    TimeoutError);
  const std::string large(16u << 20, 'x');  // nobody reads it
  REQUIRE_THROWS_AS(send_frame(pair.one.get(), large, {}, Deadline::after(10ms)), TimeoutError);
}

TEST_CASE("Interrupts end a wait") {
  const Pair pair;
  const InterruptHook before = set_interrupt_hook([] { throw std::runtime_error("interrupted"); });
  REQUIRE(message_of<std::runtime_error>(
              [&] { receive_frame(pair.one.get(), FrameLimits{}, soon()); }) == "interrupted");
  REQUIRE(message_of<std::runtime_error>([&] { wait_readable(pair.one.get(), 60s); }) ==
          "interrupted");
  set_interrupt_hook(before);
}

TEST_CASE("A closed end is noticed") {
  Pair pair;
  REQUIRE_FALSE(is_closed(pair.one.get()));
  send_frame(pair.other.get(), "last words", {}, soon());
  pair.other.reset();
  REQUIRE_FALSE(is_closed(pair.one.get()));
  REQUIRE(receive_frame(pair.one.get(), FrameLimits{}, soon()).bytes == "last words");
  REQUIRE(is_closed(pair.one.get()));
  REQUIRE(wait_readable(pair.one.get(), 60s));
  REQUIRE_THROWS_AS(receive_frame(pair.one.get(), FrameLimits{}, soon()), NetworkError);
  REQUIRE_THROWS_AS(send_frame(pair.one.get(), "x", {}, soon()), NetworkError);
}

TEST_CASE("A killed process closes its connection") {
  UnixListener listener = UnixListener::open();
  keep_in_children(listener.fd());
  const auto results = libddp::test::fork_ranks(2, [&](int rank) -> std::string {
    if (rank == 0) {
      const UniqueFd connection = connect_unix(listener.name(), soon());
      send_frame(connection.get(), "here", {}, soon());
      ::kill(::getpid(), SIGKILL);
    }
    const UniqueFd connection = listener.accept(60s);
    expect(receive_frame(connection.get(), FrameLimits{}, soon()).bytes == "here", "the frame");
    return message_of<NetworkError>(
        [&] { receive_frame(connection.get(), FrameLimits{}, soon()); });
  });
  REQUIRE(results[0].signal == SIGKILL);
  INFO(results[1].text);
  REQUIRE(results[1].ok());
}
