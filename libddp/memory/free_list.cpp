#include "libddp/memory/free_list.h"

#include "libddp/base/check.h"

namespace libddp {

void FreeList::insert(std::uint64_t offset, std::uint64_t size) {
  if (size == 0) return;
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
  free_size_ += size;
}

void FreeList::erase(ByOffset::iterator range) {
  free_size_ -= range->second;
  by_size_.erase({range->second, range->first});
  by_offset_.erase(range);
}

std::optional<std::uint64_t> FreeList::take(std::uint64_t size, std::uint64_t alignment) {
  // A range may be large enough and still too short once its start is aligned: then the next
  // larger one is tried.
  for (auto it = by_size_.lower_bound({size, 0}); it != by_size_.end(); ++it) {
    const auto [range_size, offset] = *it;
    const std::uint64_t start = (offset + alignment - 1) / alignment * alignment;
    const std::uint64_t end = offset + range_size;
    if (start > end || end - start < size) continue;
    erase(by_offset_.find(offset));
    insert(offset, start - offset);
    insert(start + size, end - start - size);
    return start;
  }
  return std::nullopt;
}

std::optional<FreeList::Range> FreeList::take_largest() {
  if (by_size_.empty()) return std::nullopt;
  const auto [size, offset] = *by_size_.rbegin();
  erase(by_offset_.find(offset));
  return Range{offset, size};
}

void FreeList::give(std::uint64_t offset, std::uint64_t size) {
  auto next = by_offset_.lower_bound(offset);
  LIBDDP_CHECK(next == by_offset_.end() || offset + size <= next->first, "range freed twice");
  if (next != by_offset_.end() && offset + size == next->first) {
    size += next->second;
    auto merged = next++;
    erase(merged);
  }
  if (next != by_offset_.begin()) {
    auto before = std::prev(next);
    LIBDDP_CHECK(before->first + before->second <= offset, "range freed twice");
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      erase(before);
    }
  }
  insert(offset, size);
}

}  // namespace libddp
