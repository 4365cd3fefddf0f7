// A memory of slots in which anything may stand: a part of a sound one is replaced by the input,
// whose first bytes say where. Nothing outside of the memory is read.

#include <fcntl.h>

#include <cstring>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/slots/scatter.h"
#include "libddp/slots/slot_memory.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  static SlotMemory sound = [] {
    SlotMemory memory = SlotMemory::create(
        PieceLayout::of({{.key = "w", .dtype = "F32", .shape = {100}, .begin = 0, .end = 100}}),
        {.run = "job", .rank = 0, .world_size = 2}, 256);
    const std::vector<std::byte> tensor(400, std::byte{7});
    const std::span<const std::byte> sources[] = {tensor};
    memory.slot(0).fill({.step = 1, .sequence = 1}, sources, "{}", 1);
    return memory;
  }();
  static SharedSegment copy = SharedSegment::create("libddp-fuzz", sound.size_bytes());
  std::memcpy(copy.data(), sound.data(), sound.size_bytes());
  const std::size_t at = static_cast<std::size_t>(data[0] | data[1] << 8) % sound.size_bytes();
  std::memcpy(copy.data() + at, data + 2, std::min(size - 2, sound.size_bytes() - at));
  try {
    const SlotMemory memory = SlotMemory::open(UniqueFd(::fcntl(copy.fd(), F_DUPFD_CLOEXEC, 0)));
    for (int i = 0; i < SlotMemory::kSlots; ++i) {
      if (!memory.slot(i).whole()) continue;
      memory.slot(i).values();
      verify(SlotSource(memory, i));
    }
  } catch (const SnapshotError&) {
  }
  return 0;
}
