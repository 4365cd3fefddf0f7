#pragma once

// Memory of a first save, whose pages the kernel clears before they are needed: that takes five
// times as long as the copy. Nobody knows its exact size yet, so it is cut when it is taken.
// Thread rule: one thread at a time.
//
//   ReadyPages pages(/*size_bytes=*/300 << 20, {.begin = 2 << 20, .bytes = 140 << 20});   // begins
//   ...                                                                      // a step of training
//   memory.make(pieces, values.size(), generation, pages.take());

#include <cstdint>
#include <memory>

#include "libddp/memory/prefault.h"
#include "libddp/memory/shared_segment.h"
#include "libddp/slots/slot_memory.h"

namespace libddp {

class ReadyPages {
 public:
  /// `size_bytes`: the expected size of the memory; it may become some more. `first`: what the
  /// first save writes of it; the rest is left as it is. Throws Error if there is no memory to map.
  ReadyPages(std::uint64_t size_bytes, const SlotMemory::Range& first);
  ~ReadyPages();
  ReadyPages(const ReadyPages&) = delete;
  ReadyPages& operator=(const ReadyPages&) = delete;

  /// Of the machine's memory, taken so far.
  std::uint64_t bytes() const;
  /// Whatever has been cleared by now; nothing is left here.
  SharedSegment take();

 private:
  SharedSegment segment_;
  const std::shared_ptr<PrefaultJob> job_;
};

}  // namespace libddp
