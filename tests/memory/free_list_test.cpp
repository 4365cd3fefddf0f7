#include "libddp/memory/free_list.h"

#include <random>
#include <vector>

#include "libddp/base/error.h"
#include "tests/support/catch.h"

using libddp::FreeList;

TEST_CASE("FreeList hands out the smallest range that fits") {
  FreeList free;
  free.give(0, 1000);
  free.give(2000, 100);
  free.give(3000, 500);
  REQUIRE(free.take(100, 1) == 2000u);
  REQUIRE(free.take(101, 1) == 3000u);
  REQUIRE(free.take(400, 1) == 0u);
  REQUIRE(free.free_size() == 1600 - 100 - 101 - 400);
  REQUIRE(free.largest() == 600);
}

TEST_CASE("FreeList aligns and keeps what lies before") {
  FreeList free;
  free.give(100, 1000);
  REQUIRE(free.take(200, 256) == 256u);
  REQUIRE(free.num_ranges() == 2);
  REQUIRE(free.take(156, 1) == 100u);
  REQUIRE(free.take(644, 1) == 456u);
  REQUIRE(free.free_size() == 0);
  REQUIRE_FALSE(free.take(1, 1));
}

TEST_CASE("FreeList skips a range that alignment makes too short") {
  FreeList free;
  free.give(1, 128);     // only [128, 129) is aligned
  free.give(1000, 300);  // [1024, 1300) is
  REQUIRE(free.take(128, 128) == 1024u);
}

TEST_CASE("FreeList merges with both neighbours") {
  FreeList free;
  free.give(0, 10);
  free.give(20, 10);
  REQUIRE(free.num_ranges() == 2);
  free.give(10, 10);
  REQUIRE(free.num_ranges() == 1);
  REQUIRE(free.largest() == 30);
  REQUIRE(free.take(30, 1) == 0u);
}

TEST_CASE("FreeList takes the largest range whole") {
  FreeList free;
  REQUIRE_FALSE(free.take_largest());
  free.give(0, 10);
  free.give(50, 40);
  const auto range = free.take_largest();
  REQUIRE(range);
  REQUIRE(range->offset == 50);
  REQUIRE(range->size == 40);
  REQUIRE(free.free_size() == 10);
}

TEST_CASE("FreeList refuses what is free already") {
  FreeList free;
  free.give(0, 100);
  REQUIRE_THROWS_AS(free.give(50, 10), libddp::Error);
  REQUIRE_THROWS_AS(free.give(0, 200), libddp::Error);
  REQUIRE_THROWS_AS(free.give(99, 1), libddp::Error);
  REQUIRE(free.free_size() == 100);
}

TEST_CASE("FreeList against a plain map of bytes") {
  constexpr std::uint64_t kSize = 4096;
  FreeList free;
  free.give(0, kSize);
  std::vector<bool> used(kSize, false);
  struct Block {
    std::uint64_t offset, size;
  };
  std::vector<Block> blocks;
  std::mt19937 random(7);
  for (int step = 0; step < 5000; ++step) {
    if (blocks.empty() || random() % 2 == 0) {
      const std::uint64_t size = 1 + random() % 200;
      const std::uint64_t alignment = std::uint64_t{1} << (random() % 6);
      const auto offset = free.take(size, alignment);
      if (!offset) continue;
      REQUIRE(*offset % alignment == 0);
      for (std::uint64_t at = *offset; at < *offset + size; ++at) {
        if (used[at]) FAIL("byte " << at << " handed out twice");
        used[at] = true;
      }
      blocks.push_back({*offset, size});
    } else {
      const std::size_t index = random() % blocks.size();
      const Block block = blocks[index];
      blocks[index] = blocks.back();
      blocks.pop_back();
      free.give(block.offset, block.size);
      for (std::uint64_t at = block.offset; at < block.offset + block.size; ++at) used[at] = false;
    }
  }
  for (const Block& block : blocks) free.give(block.offset, block.size);
  REQUIRE(free.free_size() == kSize);
  REQUIRE(free.num_ranges() == 1);
}
