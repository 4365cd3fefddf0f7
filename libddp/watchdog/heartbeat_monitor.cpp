#include "libddp/watchdog/heartbeat_monitor.h"

#include "libddp/base/env.h"

namespace libddp {

void HeartbeatMonitor::observe(std::uint64_t beats, std::int64_t now_ns) {
  if (beats == beats_) return;
  beats_ = beats;
  seen_ns_ = now_ns;
}

void HeartbeatMonitor::forgive(std::int64_t now_ns) {
  if (seen_ns_ != 0) seen_ns_ = now_ns;
}

std::chrono::nanoseconds HeartbeatMonitor::silence(std::int64_t now_ns) const {
  return std::chrono::nanoseconds(seen_ns_ == 0 ? 0 : now_ns - seen_ns_);
}

HeartbeatMonitor::Verdict HeartbeatMonitor::judge(std::int64_t now_ns) {
  if (!timeout_ || is_dead_) return Verdict::Alive;
  const std::chrono::nanoseconds quiet = silence(now_ns);
  if (quiet >= *timeout_) {
    is_dead_ = true;
    return Verdict::Dead;
  }
  const bool was_silent = is_silent_;
  is_silent_ = quiet >= *timeout_ * 3 / 5;
  if (is_silent_ == was_silent) return Verdict::Alive;
  return is_silent_ ? Verdict::Silent : Verdict::Back;
}

std::optional<std::chrono::milliseconds> heartbeat_timeout() {
  constexpr long kDefault = 5;
  constexpr long kDay = 24 * 60 * 60;
  const long seconds = env_integer("LIBDDP_HEARTBEAT_TIMEOUT", 0, kDay).value_or(kDefault);
  if (seconds == 0) return std::nullopt;
  return std::chrono::seconds(seconds);
}

}  // namespace libddp
