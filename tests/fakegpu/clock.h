#pragma once

// Vector clocks over streams: component s is the number of the last operation of stream s (its
// slot) that is known to be over. Not synchronised; AccessLog's mutex guards those that are shared.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fakegpu {

class Clock {
 public:
  std::uint64_t at(std::size_t slot) const { return slot < ticks_.size() ? ticks_[slot] : 0; }

  /// The number of the operation that begins now.
  std::uint64_t tick(std::size_t slot) {
    if (slot >= ticks_.size()) ticks_.resize(slot + 1);
    return ++ticks_[slot];
  }

  /// From now on everything that `other` knows is known. False: it was before.
  bool join(const Clock& other) {
    if (other.ticks_.size() > ticks_.size()) ticks_.resize(other.ticks_.size());
    bool grew = false;
    for (std::size_t slot = 0; slot < other.ticks_.size(); ++slot) {
      grew = grew || other.ticks_[slot] > ticks_[slot];
      ticks_[slot] = std::max(ticks_[slot], other.ticks_[slot]);
    }
    return grew;
  }

 private:
  std::vector<std::uint64_t> ticks_;
};

}  // namespace fakegpu
