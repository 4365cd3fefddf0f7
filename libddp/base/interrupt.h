#pragma once

// Lets the embedding program break long waits: Python's Ctrl-C must end a collective that waits.
//
// The library waits in pieces of kInterruptPeriod and calls the hook between them, in the waiting
// thread and without holding a lock. The hook may throw; its exception leaves the wait.
// Thread rule: any thread; the hook is called from many threads, possibly at the same time.
//
//   set_interrupt_hook([] { if (user_pressed_ctrl_c()) throw Interrupted(); });
//   InterruptPoll interrupt;
//   while (!ready()) { sleep_a_little(); interrupt.poll(); }

#include <chrono>

namespace libddp {

using InterruptHook = void (*)();

/// Longest piece that a wait sleeps before it looks at the hook again.
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

/// Installs `hook` for the process, nullptr for none; returns the one before.
InterruptHook set_interrupt_hook(InterruptHook hook);

/// Calls the hook now. Throws PeerError where this process was asked to leave (departure.h).
void check_interrupt();

/// Calls the hook at most once per kInterruptPeriod, for loops that turn faster.
class InterruptPoll {
 public:
  void poll() {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + kInterruptPeriod;
    check_interrupt();
  }

 private:
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + kInterruptPeriod;
};

}  // namespace libddp
