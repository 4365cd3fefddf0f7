// Many threads on one arena; each writes its own pattern and finds it unchanged.

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "libddp/memory/arena.h"
#include "libddp/memory/empty_cache.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

using namespace libddp;
using libddp::test::expect;
using libddp::test::run_ranks;

namespace {

constexpr int kThreads = 4;

struct Block {
  std::shared_ptr<std::byte> data;
  std::size_t size_bytes = 0;
  std::byte mark{0};
};

// The ends of the block and a few bytes between carry the mark.
void stamp(const Block& block) {
  for (std::size_t at = 0; at < block.size_bytes; at += 4093) block.data.get()[at] = block.mark;
  block.data.get()[block.size_bytes - 1] = block.mark;
}

bool is_whole(const Block& block) {
  for (std::size_t at = 0; at < block.size_bytes; at += 4093) {
    if (block.data.get()[at] != block.mark) return false;
  }
  return block.data.get()[block.size_bytes - 1] == block.mark;
}

std::size_t draw_size(std::mt19937& random) {
  switch (random() % 4) {
    case 0:
      return 1 + random() % 300;
    case 1:
      return 1 + random() % 100'000;
    case 2:
      return 1 + random() % (1u << 20);
    default:
      return 1 + random() % (6u << 20);
  }
}

}  // namespace

TEST_CASE("Threads allocate, write and free at once") {
  const auto arena = Arena::create("stress", std::size_t{1} << 30);
  run_ranks(kThreads, [&](int rank) {
    std::mt19937 random(static_cast<unsigned>(rank));
    std::vector<Block> blocks;
    for (int step = 0; step < 400; ++step) {
      if (step % 50 == rank) empty_cache();
      if (blocks.size() < 12 && random() % 2 == 0) {
        Block block{nullptr, draw_size(random), static_cast<std::byte>(random() % 256)};
        block.data = arena->allocate(block.size_bytes);
        stamp(block);
        blocks.push_back(std::move(block));
      } else if (!blocks.empty()) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        expect(is_whole(blocks.back()), "nobody else wrote into the block");
        blocks.pop_back();
      }
      expect(!blocks.empty() ? arena->offset_of(blocks[0].data.get(), 1).has_value() : true,
             "the block lies in the arena");
    }
    for (const Block& block : blocks) expect(is_whole(block), "nobody else wrote into the block");
  });
  REQUIRE(arena->used_bytes() == 0);
  REQUIRE(arena->allocate((std::size_t{1} << 30) - (4u << 20)) != nullptr);
}

TEST_CASE("Blocks are freed by another thread than the one that took them") {
  const auto arena = Arena::create("stress", std::size_t{1} << 30);
  std::mutex mutex;
  std::vector<Block> market;
  run_ranks(kThreads, [&](int rank) {
    std::mt19937 random(100u + static_cast<unsigned>(rank));
    for (int step = 0; step < 300; ++step) {
      Block mine{nullptr, draw_size(random), static_cast<std::byte>(random() % 256)};
      mine.data = arena->allocate(mine.size_bytes);
      stamp(mine);
      Block theirs;
      {
        const std::lock_guard lock(mutex);
        market.push_back(std::move(mine));
        std::swap(market[random() % market.size()], market.back());
        if (market.size() > 10) {
          theirs = std::move(market.back());
          market.pop_back();
        }
      }
      if (theirs.data) expect(is_whole(theirs), "nobody else wrote into the block");
    }
  });
  market.clear();
  REQUIRE(arena->used_bytes() == 0);
}
