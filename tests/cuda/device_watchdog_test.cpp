// When the thread that watches devices looks, and when it sleeps.

#include "libddp/cuda/device_watchdog.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "tests/support/catch.h"

using namespace libddp;

namespace {

using std::chrono::milliseconds;

/// Counts the looks at it.
class Counted final : public DeviceWatchdog::Watched {
 public:
  bool look() noexcept override {
    ++num_looks_;
    return is_in_flight;
  }
  int num_looks() const { return num_looks_.load(); }
  bool comes_to(int num_looks) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (num_looks_.load() < num_looks && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return num_looks_.load() >= num_looks;
  }

  std::atomic<bool> is_in_flight{false};

 private:
  std::atomic<int> num_looks_{0};
};

}  // namespace

TEST_CASE("the watchdog of devices looks on for a while, then sleeps until it is woken") {
  DeviceWatchdog& watchdog = DeviceWatchdog::get();
  const auto counted = std::make_shared<Counted>();
  watchdog.add(counted);
  watchdog.wake();
  REQUIRE(counted->comes_to(DeviceWatchdog::kLooksBeforeSleep));
  // Long enough for some more looks, were it awake.
  std::this_thread::sleep_for(20 * DeviceWatchdog::kPeriod);
  const int asleep = counted->num_looks();
  CHECK(asleep < DeviceWatchdog::kLooksBeforeSleep + 10);
  std::this_thread::sleep_for(20 * DeviceWatchdog::kPeriod);
  CHECK(counted->num_looks() == asleep);

  watchdog.wake();
  CHECK(counted->comes_to(asleep + 1));
  watchdog.remove(*counted);
  const int removed = counted->num_looks();
  watchdog.wake();
  std::this_thread::sleep_for(5 * DeviceWatchdog::kPeriod);
  CHECK(counted->num_looks() == removed);
}

TEST_CASE("the watchdog of devices does not sleep while anything is in flight") {
  DeviceWatchdog& watchdog = DeviceWatchdog::get();
  const auto counted = std::make_shared<Counted>();
  counted->is_in_flight = true;
  watchdog.add(counted);
  watchdog.wake();
  CHECK(counted->comes_to(DeviceWatchdog::kLooksBeforeSleep + 20));
  watchdog.remove(*counted);
}
