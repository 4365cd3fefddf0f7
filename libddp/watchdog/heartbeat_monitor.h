#pragma once

// Judges by a peer's heartbeats whether its process still runs. Only the observer's own monotonic
// clock counts: a beat is as old as the moment at which it was seen.
//
// A peer that has never beaten is not judged: it may still be joining. An observer that was away
// itself (stopped, suspended, not scheduled) has missed beats through its own fault and calls
// `forgive`.
// Thread rule: one thread.
//
//   HeartbeatMonitor heartbeat(std::chrono::seconds(5));
//   heartbeat.observe(beats, now_ns);
//   if (heartbeat.judge(now_ns) == HeartbeatMonitor::Verdict::Dead) report_loss();

#include <chrono>
#include <cstdint>
#include <optional>

namespace libddp {

class HeartbeatMonitor {
 public:
  enum class Verdict {
    Alive,
    /// No beat for 3/5 of the timeout; said once.
    Silent,
    /// Beats have come again after that; said once.
    Back,
    /// No beat for the timeout; said once.
    Dead,
  };

  /// nullopt: no verdicts.
  explicit HeartbeatMonitor(std::optional<std::chrono::milliseconds> timeout) : timeout_(timeout) {}

  /// Beats seen so far; any change counts.
  void observe(std::uint64_t beats, std::int64_t now_ns);
  /// Starts to count anew.
  void forgive(std::int64_t now_ns);
  Verdict judge(std::int64_t now_ns);
  /// Time since the last beat; 0 before the first.
  std::chrono::nanoseconds silence(std::int64_t now_ns) const;
  /// Longer than beats are apart: look often.
  bool is_doubtful(std::int64_t now_ns) const { return silence(now_ns) > kBeatPeriod * 3 / 2; }

  /// How often a rank beats.
  static constexpr std::chrono::nanoseconds kBeatPeriod = std::chrono::milliseconds(500);

 private:
  std::optional<std::chrono::milliseconds> timeout_;
  std::uint64_t beats_ = 0;
  std::int64_t seen_ns_ = 0;
  bool is_silent_ = false;
  bool is_dead_ = false;
};

/// LIBDDP_HEARTBEAT_TIMEOUT in seconds; 5 s without it, nullopt for 0 (off). Throws ArgumentError.
std::optional<std::chrono::milliseconds> heartbeat_timeout();

}  // namespace libddp
