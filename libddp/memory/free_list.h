#pragma once

// Which parts of a range of offsets are free: best fit, neighbours merged. Pure bookkeeping,
// touches no memory. Thread rule: one thread at a time.
//
//   FreeList free;
//   free.give(0, 1 << 20);
//   std::optional<std::uint64_t> offset = free.take(4096, 128);
//   free.give(*offset, 4096);

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace libddp {

class FreeList {
 public:
  struct Range {
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
  };

  /// Takes `size` (> 0) at a multiple of `alignment` out of the smallest range that holds it;
  /// nullopt if none does.
  std::optional<std::uint64_t> take(std::uint64_t size, std::uint64_t alignment);

  /// Takes the largest range whole; nullopt if nothing is free.
  std::optional<Range> take_largest();

  /// Makes [offset, offset + size) free. REQUIRES: no part of it is free.
  void give(std::uint64_t offset, std::uint64_t size);

  std::uint64_t free_size() const { return free_size_; }
  /// Size of the largest range.
  std::uint64_t largest() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  std::size_t num_ranges() const { return by_offset_.size(); }

 private:
  using ByOffset = std::map<std::uint64_t, std::uint64_t>;

  void insert(std::uint64_t offset, std::uint64_t size);
  void erase(ByOffset::iterator range);

  ByOffset by_offset_;                                         // offset -> size
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (size, offset)
  std::uint64_t free_size_ = 0;
};

}  // namespace libddp
