// MonitoredBarrier: names who is missing and leaves the group usable.

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr std::chrono::milliseconds kNoTime{0};
constexpr std::chrono::milliseconds kShort{300};
constexpr std::chrono::milliseconds kLong{60000};

std::string complaint(C10dBackend& backend, std::chrono::milliseconds timeout, bool all) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  return message_of<c10::DistNetworkError>([&] { backend.monitoredBarrier(options, all); });
}

}  // namespace

TEST_CASE("monitoredBarrier passes when all come, again and again", "[monitored]") {
  run_backends(3, [](C10dBackend& backend, int) {
    c10d::BarrierOptions options;
    options.timeout = kLong;
    for (int i = 0; i < 3; ++i) backend.monitoredBarrier(options, i == 1);
  });
}

TEST_CASE("monitoredBarrier names the lowest missing rank, or all of them", "[monitored]") {
  const bool all = GENERATE(false, true);
  run_backends(4, [&](C10dBackend& backend, int rank) {
    if (rank == 0) {
      const std::string text = complaint(backend, kShort, all);
      expect(contains(text, all ? "Ranks 1, 3 failed to pass monitoredBarrier in 300 ms"
                                : "Rank 1 failed to pass monitoredBarrier in 300 ms"),
             text);
    } else if (rank == 2) {
      const std::string text = complaint(backend, kLong, all);
      expect(contains(text,
                      "Rank 2 successfully reached monitoredBarrier, but received errors while "
                      "waiting for send/recv from rank 0"),
             text);
    }
    Tensors tensors = {full_of({1}, 1)};
    backend.allreduce(tensors, {})->wait();
    expect_equal(tensors[0], full_of({1}, 4), "the group still works");
  });
}

TEST_CASE("a monitoredBarrier without time asks once who is there", "[monitored]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    if (rank == 0) {
      const std::string text = complaint(backend, kNoTime, false);
      expect(contains(text, "Rank 0 timed out in monitoredBarrier"), text);
    }
    backend.barrier({})->wait();
  });
}

TEST_CASE("monitoredBarrier says that rank 0 did not come", "[monitored]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    if (rank == 1) {
      const std::string text = complaint(backend, kShort, false);
      expect(contains(text, "timed out in monitoredBarrier"), text);
    }
    backend.barrier({})->wait();
  });
}
