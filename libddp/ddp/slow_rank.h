#pragma once

// Which rank the others wait for, pass after pass.
//
// A rank's wait in collectives is counted against the rank that came last (Comm::add_waits). What
// overlaps with this rank's own computation costs nothing, so of each pass at most the time counts
// in which its end waited for the last buckets, or the forward before it for buffers.
// A rank that pauses now and then (it alone evaluates or saves) is not slow: of each window the few
// passes that cost most are left out before a rank is said.
// Thread rule: one thread.
//
//   SlowRankWatch watch(world_size);
//   if (const auto slow = watch.end_pass(now_ns, exposed_ns, group->waited_ns())) log(...);

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace libddp {

class SlowRankWatch {
 public:
  /// A rank that becomes slow is said within 50 passes: one whole window lies in them.
  static constexpr int kNumPasses = 25;
  /// Of the time of kNumPasses; less is not worth a word.
  static constexpr double kWorthAWord = 0.2;
  /// Passes of a window that may be pauses of a rank: one in eight.
  static constexpr int kNumPauses = 3;

  struct Slow {
    int rank = -1;
    /// Part of the time that this rank has waited for it, pauses left out.
    double share = 0.0;
  };

  explicit SlowRankWatch(int world_size);

  /// `waited_ns`: by rank, since the beginning. Says a rank once, until another one is slow.
  std::optional<Slow> end_pass(std::int64_t now_ns, std::int64_t exposed_ns,
                               const std::vector<std::int64_t>& waited_ns);
  /// Of the last kNumPasses that are over, by rank, pauses included; empty before.
  const std::vector<double>& shares() const { return shares_; }

 private:
  struct Pass {
    std::int64_t cost_ns = 0;
    std::int64_t time_ns = 0;
  };
  /// What a rank has cost in this window.
  struct Window {
    void add(Pass pass);
    double share(std::int64_t time_ns) const;
    double share_without_pauses(std::int64_t time_ns) const;

    std::int64_t cost_ns = 0;
    /// The dearest first.
    std::array<Pass, kNumPauses> pauses;
  };

  std::optional<Slow> close();
  void begin_window(std::int64_t now_ns);

  std::vector<std::int64_t> before_ns_;
  std::vector<Window> windows_;
  std::vector<double> shares_;
  std::int64_t begin_ns_ = 0;
  std::int64_t end_ns_ = 0;
  int num_passes_ = 0;
  int said_ = -1;
};

}  // namespace libddp
