// Threads that wait for another library's works, at the end of what they belong to.

#include "libddp/interop/c10d_waiters.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "tests/support/catch.h"

using namespace libddp;
using namespace std::chrono_literals;

namespace {

/// Takes its time to go, as a tensor does for which the interpreter lock must be had.
class Slow {
 public:
  Slow(std::promise<void>& goes, std::atomic<bool>& is_gone) : goes_(goes), is_gone_(is_gone) {}
  Slow(const Slow&) = delete;
  Slow& operator=(const Slow&) = delete;
  ~Slow() {
    goes_.set_value();
    std::this_thread::sleep_for(100ms);
    is_gone_ = true;
  }

 private:
  std::promise<void>& goes_;
  std::atomic<bool>& is_gone_;
};

void watch_slow(C10dWaiters& waiters, std::promise<void>& goes, std::atomic<bool>& is_gone,
                std::shared_future<void> end) {
  auto slow = std::make_shared<Slow>(goes, is_gone);
  waiters.watch([slow = std::move(slow), end] { end.wait(); }, [](const std::exception_ptr&) {});
}

}  // namespace

TEST_CASE("who destroys waiters waits for what they let go of", "[c10d_waiters]") {
  std::promise<void> goes, ends;
  std::atomic<bool> is_gone{false};
  {
    C10dWaiters waiters;
    watch_slow(waiters, goes, is_gone, ends.get_future().share());
    ends.set_value();
    goes.get_future().wait();
    REQUIRE_FALSE(is_gone);
  }
  REQUIRE(is_gone);
}

// The last one: it changes the waiters of the whole process that there are.
TEST_CASE("nothing is let go of once all are settled, and what waits is left", "[c10d_waiters]") {
  std::promise<void> goes, ends, goes_late, ends_late;
  std::atomic<bool> is_gone{false}, is_late_gone{false};
  C10dWaiters waiters;
  watch_slow(waiters, goes_late, is_late_gone, ends_late.get_future().share());
  watch_slow(waiters, goes, is_gone, ends.get_future().share());
  ends.set_value();
  goes.get_future().wait();
  C10dWaiters::settle_all();
  REQUIRE(is_gone);
  REQUIRE_FALSE(waiters.is_idle());
  ends_late.set_value();
  waiters.drain([] { return false; });
  REQUIRE(waiters.is_idle());
  REQUIRE_FALSE(is_late_gone);
}
