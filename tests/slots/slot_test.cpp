#include "libddp/slots/slot.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <numeric>
#include <random>

#include "libddp/base/error.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/scatter.h"
#include "libddp/slots/slot_memory.h"
#include "tests/slots/stored_tensors.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace libddp::test;

namespace {

UniqueFd duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

TEST_CASE("a slot gives back what was stored, through any mapping", "[slot]") {
  StoredTensors tensors({"w", "m"}, 3 * kChunkBytes / 4 + 13);
  SlotMemory memory = tensors.memory();
  REQUIRE(!memory.slot(0).whole());
  tensors.fill(1);
  tensors.store(memory, 0, {.step = 7, .sequence = 3}, "{\"a\":1}");
  const SlotMemory same = SlotMemory::open(duplicate(memory.fd()));
  REQUIRE(same.identity().run == "job 7");
  REQUIRE(same.slot(0).whole() == SavedStep{7, 3});
  REQUIRE(!same.slot(1).whole());
  REQUIRE(same.slot(0).values() == "{\"a\":1}");
  const auto kept = tensors.bytes();
  tensors.fill(2);
  for (const int threads : {1, 3}) {
    scatter(SlotSource(same, 0), tensors.segments(same.layout()), threads);
    REQUIRE(tensors.bytes() == kept);
  }
}

TEST_CASE("of two slots one is whole at every moment", "[slot]") {
  StoredTensors tensors({"w"}, 1000);
  SlotMemory memory = tensors.memory();
  for (std::uint64_t i = 1; i < 6; ++i) {
    tensors.fill(static_cast<unsigned>(i));
    tensors.store(memory, static_cast<int>(i % 2), {.step = static_cast<int>(i), .sequence = i});
    const auto other = memory.slot(1 - static_cast<int>(i % 2)).whole();
    REQUIRE(other.has_value() == (i > 1));
  }
  memory.slot(1).discard();
  REQUIRE(!memory.slot(1).whole());
  REQUIRE(memory.slot(0).whole() == SavedStep{4, 4});
}

TEST_CASE("the spare slot takes no memory before it is used", "[slot]") {
  StoredTensors tensors({"w", "m"}, 3 * kChunkBytes);
  SlotMemory memory = tensors.memory();
  const std::uint64_t needed = SlotMemory::bytes_needed(memory.layout(), memory.values_capacity());
  const auto taken = [&] {
    struct stat status {};
    REQUIRE(::fstat(memory.fd(), &status) == 0);
    return static_cast<std::uint64_t>(status.st_blocks) * 512;
  };
  for (int slot = 0; slot < SlotMemory::kSpare; ++slot) {
    tensors.store(memory, slot, {.step = slot, .sequence = 1u + static_cast<unsigned>(slot)});
  }
  REQUIRE(taken() <= needed);
  REQUIRE(taken() >= 2 * memory.layout().data_bytes());
  REQUIRE(needed + memory.layout().data_bytes() <=
          SlotMemory::bytes_mapped(memory.layout(), memory.values_capacity()));
  tensors.store(memory, SlotMemory::kSpare, {.step = 9, .sequence = 9});
  REQUIRE(taken() >= 3 * memory.layout().data_bytes());
  const SlotMemory same = SlotMemory::open(duplicate(memory.fd()));
  REQUIRE(same.slot(SlotMemory::kSpare).whole() == SavedStep{9, 9});
  verify(SlotSource(same, SlotMemory::kSpare));
}

TEST_CASE("a memory is made of what was reserved, where that suffices", "[slot]") {
  StoredTensors tensors({"w", "m"}, kChunkBytes);
  const std::uint64_t mapped = SlotMemory::bytes_mapped(tensors.layout(), 4096);
  const auto first = SlotMemory::data_of_first_save(tensors.layout(), 4096);
  REQUIRE(first.bytes == tensors.layout().data_bytes());
  for (const std::uint64_t reserved : {mapped - 1, mapped, 2 * mapped}) {
    SharedSegment segment = SharedSegment::reserve("libddp-test", reserved);
    const UniqueFd fd = duplicate(segment.fd());
    SlotMemory memory =
        SlotMemory::create(tensors.layout(), {.run = "job 7"}, 4096, std::move(segment));
    REQUIRE(memory.is_behind(fd.get()) == (reserved >= mapped));
    REQUIRE(memory.size_bytes() == mapped);
    REQUIRE(memory.slot(0).data().data() == memory.data() + first.begin);
    tensors.store(memory, 0, {.step = 7, .sequence = 3});
    const SlotMemory same = SlotMemory::open(duplicate(memory.fd()));
    verify(SlotSource(same, 0));
    same.check();
    memory.data()[8] ^= std::byte{1};
    REQUIRE(contains(message_of<SnapshotError>([&] { same.check(); }), "is of version"));
  }
}

TEST_CASE("a slot holds nothing, and values, too", "[slot]") {
  StoredTensors tensors({"w"}, 0);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 0, {.step = 0, .sequence = 1}, "null");
  REQUIRE(memory.slot(0).whole() == SavedStep{0, 1});
  verify(SlotSource(memory, 0));
}

TEST_CASE("every flipped bit of a slot is found", "[slot]") {
  StoredTensors tensors({"w", "m"}, kChunkBytes / 2 + 77);
  SlotMemory memory = tensors.memory();
  tensors.fill(5);
  tensors.store(memory, 0, {.step = 7, .sequence = 3}, R"({"lr":0.1})");
  std::mt19937_64 random(1);
  int in_data = 0;
  int elsewhere = 0;
  const auto end = static_cast<std::uint64_t>(memory.slot(1).data().data() - memory.data());
  // The header, the slot's record, the layout, and everything.
  const std::uint64_t places[][2] = {
      {0, 128}, {1024, 1088}, {4096, 4096 + memory.layout().text().size()}, {0, end}};
  for (int trial = 0; trial < 1000; ++trial) {
    const auto& [first, last] = places[trial % 4];
    const std::uint64_t at = first + random() % (last - first);
    std::byte& byte = memory.data()[at];
    const auto flipped = static_cast<std::byte>(1u << (random() % 8));
    const std::byte before = byte;
    byte ^= flipped;
    std::string found;
    try {
      const SlotMemory opened = SlotMemory::open(duplicate(memory.fd()));
      if (!opened.slot(0).whole()) {
        found = "not whole";
        // Never just gone: that would look like a save that nobody has made.
        REQUIRE(opened.slot(0).damage());
      } else {
        verify(SlotSource(opened, 0));
      }
    } catch (const SnapshotError& error) {
      found = error.what();
    }
    byte = before;
    const bool is_data = found.find("is damaged: bytes") != std::string::npos;
    (is_data ? in_data : elsewhere) += !found.empty();
    // Only what nothing is kept in may go unseen: the rest of a page, the other slot's record.
    if (found.empty()) REQUIRE(tensors.is_unused(memory, at));
  }
  REQUIRE(in_data > 100);
  REQUIRE(elsewhere > 500);
}

TEST_CASE("a slot that was whole and is not says what is wrong with it", "[slot]") {
  StoredTensors tensors({"w"}, 100);
  SlotMemory memory = tensors.memory();
  REQUIRE(!memory.slot(0).damage());
  memory.slot(0).begin();
  REQUIRE(!memory.slot(0).damage());  // its writer may still come
  tensors.fill(5);
  tensors.store(memory, 0, {.step = 7, .sequence = 3}, R"({"lr":0.1})");
  REQUIRE(!memory.slot(0).damage());
  const auto flipped = [&](const void* at, const std::string& reason, bool has_step) {
    auto* byte = static_cast<std::byte*>(const_cast<void*>(at));
    *byte ^= std::byte{16};
    const auto damage = memory.slot(0).damage();
    REQUIRE(!memory.slot(0).whole());
    *byte ^= std::byte{16};
    REQUIRE(damage);
    REQUIRE(damage->reason == reason);
    REQUIRE(damage->saved.has_value() == has_step);
    if (has_step) REQUIRE(*damage->saved == SavedStep{7, 3});
  };
  const std::byte* const record = memory.data() + 1024;
  flipped(record + offsetof(SlotRecord, state), "its state is not as it was stored", true);
  flipped(record + offsetof(SlotRecord, step), "its record is not as it was stored", false);
  flipped(memory.slot(0).table().data(), "its table of checksums is not as it was stored", true);
  const std::string_view all(reinterpret_cast<const char*>(memory.data()), memory.size_bytes());
  const std::size_t values = all.find(R"({"lr":0.1})");
  REQUIRE(values != std::string_view::npos);
  flipped(memory.data() + values, "its text of values is not as it was stored", true);
  REQUIRE(memory.slot(0).whole() == SavedStep{7, 3});
}

TEST_CASE("a damaged chunk is named by its tensor and bytes", "[slot]") {
  StoredTensors tensors({"w", "m"}, kChunkBytes);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 0, {.step = 7, .sequence = 3});
  const std::size_t at = memory.layout().find("m")->offset + 17;
  const_cast<std::byte&>(memory.slot(0).data()[at]) ^= std::byte{1};
  const std::string message = message_of<SnapshotError>(
      [&] { scatter(SlotSource(memory, 0), tensors.segments(memory.layout())); });
  REQUIRE(contains(message, "the memory of rank 1 of 4 at step 7 is damaged"));
  REQUIRE(contains(message, "of 'm'"));
}

TEST_CASE("a chunk of which nothing is wanted is not read", "[slot]") {
  StoredTensors tensors({"w", "m"}, kChunkBytes);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 0, {.step = 7, .sequence = 3});
  auto segments = tensors.segments(memory.layout());
  const std::size_t damaged = memory.layout().find("m")->offset;
  const_cast<std::byte&>(memory.slot(0).data()[damaged]) ^= std::byte{1};
  std::erase_if(segments, [&](const Segment& segment) { return segment.offset == damaged; });
  REQUIRE(segments.size() == 1);
  scatter(SlotSource(memory, 0), segments);
}

TEST_CASE("memory that is no snapshot is refused", "[slot]") {
  const auto refused = [](UniqueFd fd) {
    return message_of<SnapshotError>([&] { SlotMemory::open(std::move(fd)); });
  };
  SharedSegment foreign = SharedSegment::create("libddp-test", 1 << 20);
  REQUIRE(contains(refused(duplicate(foreign.fd())), "something else"));
  SharedSegment small = SharedSegment::create("libddp-test", 100);
  REQUIRE(contains(refused(duplicate(small.fd())), "it has 100 bytes"));
  REQUIRE(contains(refused(UniqueFd(::memfd_create("unsealed", MFD_CLOEXEC))), "no snapshot"));
  REQUIRE(contains(refused(UniqueFd(::open("/dev/null", O_RDWR))), "no snapshot"));
  StoredTensors tensors({"w"}, 100);
  SlotMemory memory = tensors.memory();
  SharedSegment truncated = SharedSegment::create("libddp-test", 3 * 4096);
  std::memcpy(truncated.data(), memory.data(), truncated.size_bytes());
  REQUIRE(contains(refused(duplicate(truncated.fd())), "its sizes"));
}
