#include "libddp/slots/slot_writer.h"

#include <algorithm>
#include <cstring>

#include "libddp/base/error.h"
#include "libddp/slots/scatter.h"
#include "tests/slots/stored_tensors.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Source and destination of the same layout; the destination's slot 1 has an older step.
struct WriterFixture {
  WriterFixture() {
    tensors.store(to, 1, {.step = 1, .sequence = 1});
    tensors.fill(7);
    tensors.store(from, 0, {.step = 2, .sequence = 2}, R"({"lr":1})");
    const auto table = from.slot(0).table();
    checksums.assign(table.begin(), table.end());
  }

  /// `bytes` of the source, in pieces.
  void write(SlotWriter& writer, std::size_t bytes) const {
    const auto data = from.slot(0).data();
    for (std::size_t at = 0; at < bytes;) {
      const std::size_t piece = std::min({writer.space().size(), bytes - at, std::size_t{777'777}});
      std::memcpy(writer.space().data(), data.data() + at, piece);
      writer.advance(piece);
      at += piece;
    }
  }

  StoredTensors tensors{{"w", "m"}, kChunkBytes + 99};
  SlotMemory from = tensors.memory();
  SlotMemory to = tensors.memory();
  std::vector<std::uint32_t> checksums;
};

}  // namespace

TEST_CASE("a slot is whole when all bytes have come, and not before", "[slot_writer]") {
  WriterFixture it;
  SlotWriter writer(it.to, 0, it.checksums);
  REQUIRE(!it.to.slot(0).whole());
  it.write(writer, it.from.slot(0).data().size());
  REQUIRE(writer.space().empty());
  REQUIRE(!it.to.slot(0).whole());
  writer.finish({.step = 2, .sequence = 2}, R"({"lr":1})");
  REQUIRE(it.to.slot(0).whole() == SavedStep{2, 2});
  REQUIRE(it.to.slot(0).values() == R"({"lr":1})");
  verify(SlotSource(it.to, 0));
  REQUIRE(it.to.slot(1).whole() == SavedStep{1, 1});
}

TEST_CASE("a writer that goes away leaves its slot empty and the other whole", "[slot_writer]") {
  WriterFixture it;
  it.tensors.store(it.to, 0, {.step = 0, .sequence = 0});
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kChunkBytes, 2 * kChunkBytes}) {
    {
      SlotWriter writer(it.to, 0, it.checksums);
      it.write(writer, bytes);
    }
    REQUIRE(!it.to.slot(0).whole());
    REQUIRE(it.to.slot(1).whole() == SavedStep{1, 1});
    verify(SlotSource(it.to, 1));
  }
}

TEST_CASE("a chunk that comes damaged is named by its tensor and bytes", "[slot_writer]") {
  WriterFixture it;
  SlotWriter writer(it.to, 0, it.checksums);
  const_cast<std::byte&>(it.from.slot(0).data()[kChunkBytes + 50]) ^= std::byte{4};
  const std::string message =
      message_of<SnapshotError>([&] { it.write(writer, it.from.slot(0).data().size()); });
  REQUIRE(contains(message, "bytes 4194304 to 8388608 have another checksum"));
  REQUIRE(contains(message, "bytes 4194304 to 4194403 of 'w', bytes 0 to 4194205 of 'm'"));
}

TEST_CASE("a slot without bytes is written, too", "[slot_writer]") {
  const StoredTensors nothing({"w"}, 0);
  SlotMemory memory = nothing.memory();
  SlotWriter writer(memory, 0, {});
  REQUIRE(writer.space().empty());
  writer.finish({.step = 3, .sequence = 3}, "");
  REQUIRE(memory.slot(0).whole() == SavedStep{3, 3});
}
