#pragma once

// Gives up what another library does not end in time: NOTE [Deadlines of another library].
//
// One thread, started by the first call and asleep until the earliest deadline; a call that ends in
// time costs two short locks.
// Thread rule: any thread; `late` runs in the clock's own, and may destroy the clock.
//
//   const auto ticket = clock.start(timeout, ForeignClock::Kind::Collective, [] { give_up(); });
//   wait();
//   clock.end(ticket);

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace libddp {

class ForeignClock {
 public:
  /// What a call waits for besides its peers: the collectives before it, or nothing.
  enum class Kind { Collective, Message };

  /// How much longer than its timeout a call may take.
  static constexpr std::chrono::milliseconds kGrace{1000};

  ForeignClock();
  ~ForeignClock();
  ForeignClock(const ForeignClock&) = delete;
  ForeignClock& operator=(const ForeignClock&) = delete;

  /// Calls `late` once if `end` has not been called in time; returns the ticket for `end`.
  std::uint64_t start(std::chrono::milliseconds timeout, Kind kind, std::function<void()> late);
  void end(std::uint64_t ticket);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace libddp
