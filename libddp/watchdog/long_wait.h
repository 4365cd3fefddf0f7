#pragma once

// Whether this rank has been in one collective for so long that the log should say so.
// Thread rule: one thread.
//
//   if (const auto seconds = wait.overdue(running, now_ns)) log(...);

#include <cstdint>
#include <optional>

namespace libddp {

class LongWait {
 public:
  static constexpr std::int64_t kLongNs = 30'000'000'000;

  /// Once per collective: how long `running` (0 = none) has been seen to run, when that is kLongNs.
  std::optional<double> overdue(std::uint64_t running, std::int64_t now_ns) {
    if (running == 0 || running != running_) {
      running_ = running;
      since_ns_ = now_ns;
      is_said_ = false;
    }
    if (is_said_ || running == 0 || now_ns - since_ns_ < kLongNs) return std::nullopt;
    is_said_ = true;
    return static_cast<double>(now_ns - since_ns_) * 1e-9;
  }

 private:
  std::uint64_t running_ = 0;
  std::int64_t since_ns_ = 0;
  bool is_said_ = false;
};

}  // namespace libddp
