#pragma once

// The collectives that a rank has called on its device, in a form that ranks can compare: NCCL
// compares nothing, and with other dtypes or counts may end well and give other numbers.
//
// Each call is mixed into a number, so that two ranks whose numbers are alike after the same call
// have called the same so far. Ranks tell theirs to a neighbour now and then, behind the calls:
// nothing waits for it, and a difference is known some tens of milliseconds later.
// Thread rule: any thread.
//
//   chain.add(description, 7);
//   while (const auto news = chain.news()) tell(neighbour, *news);
//   chain.hear(3, calls);                                      // what rank 3 has told
//   if (const auto difference = chain.compare()) fail(difference->own, difference->theirs);

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "libddp/base/op_description.h"

namespace libddp {

/// What ranks must agree on: without what they may see differently.
OpDescription as_all_ranks_see_it(OpDescription description);

/// Between calls in a text of several.
constexpr std::string_view kCallSeparator = "; ";

/// "broadcast #7 float32 [8]; all_reduce #8 float32 [8] SUM" by number.
std::map<std::uint64_t, std::string> calls_by_number(const std::string& text);

/// What a rank tells.
struct LastCalls {
  std::uint64_t sequence = 0;
  std::uint64_t chain = 0;
  /// Those that have not been told before, for messages: as calls_by_number reads them.
  std::string text;
};

class CallChain {
 public:
  struct Difference {
    int rank = -1;
    /// Up to this call the ranks differ somewhere.
    std::uint64_t sequence = 0;
    /// The first call that is known to differ; "" where it is too long ago.
    std::string own;
    std::string theirs;
  };

  /// `sequence` grows by one from call to call.
  void add(const OpDescription& description, std::uint64_t sequence);
  /// What has not been told yet, the oldest first; nothing where that is all.
  std::optional<LastCalls> news();
  void hear(int rank, const LastCalls& calls);
  /// With what has been heard, as far as this rank has come. The first difference is the last.
  std::optional<Difference> compare();
  /// The calls from `reach` before that one to `reach` behind it, by number.
  std::map<std::uint64_t, std::string> around(std::uint64_t sequence, std::uint64_t reach) const;
  /// The last call; 0 before the first one.
  std::uint64_t sequence() const;
  /// No comparison from here on: what comes is another group's.
  void end();

 private:
  static constexpr std::size_t kKept = 4096;
  /// Told at once: a message has at most 4000 characters.
  static constexpr std::size_t kTold = 48;
  /// Whose names are kept.
  static constexpr std::size_t kNamed = 512;
  /// Of a rank that is ahead: more than a device's queue takes.
  static constexpr std::size_t kAhead = 2048;
  struct Link {
    std::uint64_t sequence = 0;
    std::uint64_t chain = 0;
  };
  /// What has not been compared.
  struct Heard {
    std::deque<Link> links{};
    std::map<std::uint64_t, std::string> by_number{};
  };
  using Calls = std::deque<std::pair<OpDescription, std::uint64_t>>;

  std::optional<Difference> difference_with(int rank, const Heard& heard, const Link& told) const;
  /// Of last_, from that number on. REQUIRES: the lock.
  Calls::const_iterator from(std::uint64_t sequence) const;

  mutable std::mutex mutex_;
  /// By number.
  std::array<std::uint64_t, kKept> chain_{};
  std::uint64_t sequence_ = 0;
  std::uint64_t told_ = 0;
  Calls last_;
  std::map<int, Heard> heard_;
  bool is_over_ = false;
};

}  // namespace libddp
