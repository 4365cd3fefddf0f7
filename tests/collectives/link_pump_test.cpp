#include "libddp/collectives/link_pump.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"

using namespace libddp;

namespace {

struct PumpWatch : LinkWatch {
  void check(const std::deque<LinkFlow>&) override { FAIL("nothing moved"); }
  void report_lost(const LinkFlow&, int, int error) override { FAIL(error); }
};

std::byte pumped_byte(std::size_t i) { return static_cast<std::byte>(i * 7 + i / 1000); }

// Both ends of so many connections.
struct Cables {
  explicit Cables(int num_streams) {
    for (int i = 0; i < num_streams; ++i) {
      int pair[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
      near.emplace_back(pair[0]);
      far.emplace_back(pair[1]);
    }
  }
  std::vector<UniqueFd> near;
  std::vector<UniqueFd> far;
};

}  // namespace

TEST_CASE("Bytes go over several sockets through a ring, and count in order") {
  for (const int num_streams : {1, 2, 3, 8}) {
    const Cables cables(num_streams);
    const std::size_t bytes = (20u << 16) + 4321;
    const std::size_t ring = 8 * LinkPump::kStripeBytes;
    std::vector<std::byte> from(bytes);
    std::vector<std::byte> to(ring);
    for (std::size_t i = 0; i < bytes; ++i) from[i] = pumped_byte(i);
    PumpWatch watch;
    LinkPump sender(watch);
    LinkPump receiver(watch);
    LinkFlow& out = sender.add(
        cables.near, {.is_send = true, .data = from.data(), .bytes = bytes, .open = 1000});
    LinkFlow& in =
        receiver.add(cables.far, {.data = to.data(), .bytes = bytes, .open = ring, .ring = ring});
    std::size_t seen = 0;
    while (!receiver.is_done()) {
      out.open = std::min(bytes, out.open + 50000);
      if (!sender.move() && !receiver.move()) sender.wait();
      for (; seen < in.done; ++seen) {
        if (to[seen % ring] != pumped_byte(seen))
          FAIL("byte " << seen << " of streams " << num_streams);
      }
      in.open = std::min(bytes, seen + ring);
    }
    CHECK(seen == bytes);
    CHECK(sender.is_done());
  }
}
