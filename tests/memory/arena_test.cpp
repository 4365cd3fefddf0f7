#include "libddp/memory/arena.h"

#include <sys/stat.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/memory/empty_cache.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::message_of;

namespace {

constexpr std::size_t kMiB = 1u << 20;

// Bytes of memory that the segment holds.
std::size_t resident_bytes(const Arena& arena) {
  struct stat status {};
  expect(::fstat(arena.segment().fd(), &status) == 0, "the status of the segment");
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

std::uint64_t address(const std::shared_ptr<std::byte>& block) {
  return reinterpret_cast<std::uint64_t>(block.get());
}

}  // namespace

TEST_CASE("Arena blocks are aligned, apart and writable") {
  const auto arena = Arena::create("test", 256 * kMiB);
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (std::size_t size : {std::size_t{1}, std::size_t{127}, std::size_t{4096}, 3 * kMiB, kMiB,
                           2 * kMiB + 1, std::size_t{0}}) {
    auto block = arena->allocate(size);
    REQUIRE(address(block) % Arena::kAlignment == 0);
    if (size >= 2 * kMiB) REQUIRE(address(block) % (2 * kMiB) == 0);
    std::memset(block.get(), static_cast<int>(blocks.size()) + 1, size);
    blocks.push_back(std::move(block));
  }
  REQUIRE(blocks[0].get()[0] == std::byte{1});
  REQUIRE(blocks[3].get()[3 * kMiB - 1] == std::byte{4});
  REQUIRE(blocks[5].get()[2 * kMiB] == std::byte{6});
}

TEST_CASE("Empty blocks are valid and unique") {
  const auto arena = Arena::create("test", kMiB);
  std::set<std::byte*> pointers;
  std::vector<std::shared_ptr<std::byte>> blocks;
  for (int i = 0; i < 10; ++i) {
    blocks.push_back(arena->allocate(0));
    REQUIRE(blocks.back() != nullptr);
    pointers.insert(blocks.back().get());
  }
  REQUIRE(pointers.size() == 10);
}

TEST_CASE("Arena counts what is in use") {
  const auto arena = Arena::create("test", 64 * kMiB);
  REQUIRE(arena->used_bytes() == 0);
  auto small = arena->allocate(100);
  REQUIRE(arena->used_bytes() == 128);
  auto large = arena->allocate(2 * kMiB + 1);
  REQUIRE(arena->used_bytes() == 128 + 2 * kMiB + 4096);
  small.reset();
  large.reset();
  REQUIRE(arena->used_bytes() == 0);
}

TEST_CASE("Arena finds the offset of what lies in it") {
  const auto arena = Arena::create("test", 8 * kMiB);
  const auto first = arena->allocate(1000);
  const auto second = arena->allocate(1000);
  const std::byte* base = arena->segment().data();
  REQUIRE(arena->offset_of(second.get(), 1000) == static_cast<std::uint64_t>(second.get() - base));
  REQUIRE(arena->offset_of(second.get() + 10, 0) ==
          static_cast<std::uint64_t>(second.get() + 10 - base));
  REQUIRE(arena->offset_of(base, 8 * kMiB) == 0u);
  REQUIRE_FALSE(arena->offset_of(base, 8 * kMiB + 1));
  REQUIRE_FALSE(arena->offset_of(base + 1, 8 * kMiB));
  REQUIRE_FALSE(arena->offset_of(base + 1, SIZE_MAX));
  REQUIRE_FALSE(arena->offset_of(base - 1, 1));
  REQUIRE_FALSE(arena->offset_of(nullptr, 0));
  int on_the_stack = 0;
  REQUIRE_FALSE(arena->offset_of(&on_the_stack, sizeof(int)));
}

TEST_CASE("A peer finds the bytes by offset") {
  const auto arena = Arena::create("test", 8 * kMiB);
  const auto block = arena->allocate(16);
  std::memcpy(block.get(), "fifteen letters", 16);
  const SharedSegment theirs = SharedSegment::map(UniqueFd(::dup(arena->segment().fd())));
  const auto offset = arena->offset_of(block.get(), 16);
  REQUIRE(offset);
  REQUIRE(std::string(reinterpret_cast<char*>(theirs.data() + *offset)) == "fifteen letters");
}

TEST_CASE("Blocks outlive the Arena") {
  auto arena = Arena::create("test", 8 * kMiB);
  auto block = arena->allocate(4 * kMiB);
  arena.reset();
  std::memset(block.get(), 7, 4 * kMiB);
  REQUIRE(block.get()[4 * kMiB - 1] == std::byte{7});
}

TEST_CASE("Freed memory is used again") {
  const auto arena = Arena::create("test", 64 * kMiB);
  std::byte* first = arena->allocate(4 * kMiB).get();
  for (int i = 0; i < 100; ++i) REQUIRE(arena->allocate(4 * kMiB).get() == first);
}

TEST_CASE("Arena names the sizes when it is used up") {
  const auto arena = Arena::create("tiny", kMiB);
  const auto half = arena->allocate(kMiB / 2);
  const std::string message = message_of<Error>([&] { arena->allocate(kMiB / 2 + 1); });
  REQUIRE(contains(message, "libddp[group tiny] arena: cannot allocate 524416 bytes"));
  REQUIRE(contains(message, "524288 of 1048576 reserved bytes are in use"));
  REQUIRE(contains(message, "the largest free range has 524288"));
  REQUIRE_THROWS_AS(arena->allocate(SIZE_MAX), Error);
  REQUIRE(arena->used_bytes() == kMiB / 2);
  REQUIRE(arena->allocate(kMiB / 2) != nullptr);
}

TEST_CASE("Warm and cold pieces join when space is short") {
  const auto arena = Arena::create("test", 8 * kMiB);
  { const auto warm = arena->allocate(2 * kMiB); }
  REQUIRE(arena->allocate(8 * kMiB) != nullptr);
}

TEST_CASE("Freed memory is kept up to a limit, then given back to the kernel") {
  const auto arena = Arena::create("test", 1024 * kMiB);
  const auto fill = [&](std::size_t size) {
    auto block = arena->allocate(size);
    std::memset(block.get(), 1, size);
    return block;
  };
  SECTION("below the limit it stays") {
    fill(64 * kMiB).reset();
    REQUIRE(resident_bytes(*arena) >= 64 * kMiB);
  }
  SECTION("above the limit the surplus goes") {
    auto large = fill(300 * kMiB);
    auto other = fill(32 * kMiB);
    REQUIRE(resident_bytes(*arena) >= 332 * kMiB);
    large.reset();
    other.reset();
    REQUIRE(resident_bytes(*arena) <= 256 * kMiB);
    REQUIRE(resident_bytes(*arena) >= 200 * kMiB);
    // What was given back comes again as zeros, in memory that is still whole.
    auto again = fill(300 * kMiB);
    REQUIRE(again.get()[299 * kMiB] == std::byte{1});
  }
  SECTION("blocks in use are never touched") {
    auto kept = fill(2 * kMiB + 5);
    auto large = fill(300 * kMiB);
    auto after = fill(100);
    large.reset();
    REQUIRE(kept.get()[2 * kMiB + 4] == std::byte{1});
    REQUIRE(after.get()[99] == std::byte{1});
  }
}

TEST_CASE("An emptied cache gives freed memory back at once") {
  const auto arena = Arena::create("test", 64 * kMiB);
  const auto fill = [&](std::size_t size, int mark) {
    auto block = arena->allocate(size);
    std::memset(block.get(), mark, size);
    return block;
  };
  auto before = fill(3 * kMiB + 5, 1);
  auto large = fill(16 * kMiB, 2);
  auto after = fill(5 * kMiB, 3);
  auto small = fill(1000, 4);
  const SharedSegment theirs = SharedSegment::map(UniqueFd(::dup(arena->segment().fd())));
  const std::byte* const seen = theirs.data() + *arena->offset_of(large.get(), 1);
  const std::byte* const neighbour = theirs.data() + *arena->offset_of(after.get(), 1);
  REQUIRE(seen[16 * kMiB - 1] == std::byte{2});
  const std::size_t full = resident_bytes(*arena);
  REQUIRE(full >= 24 * kMiB);

  empty_cache();
  REQUIRE(resident_bytes(*arena) == full);  // nothing is free
  large.reset();
  REQUIRE(resident_bytes(*arena) == full);
  empty_cache();
  REQUIRE(resident_bytes(*arena) == full - 16 * kMiB);

  // Blocks in use are whole, here and where a peer maps them.
  for (std::size_t at = 0; at < 3 * kMiB + 5; at += 997) REQUIRE(before.get()[at] == std::byte{1});
  REQUIRE(before.get()[3 * kMiB + 4] == std::byte{1});
  for (std::size_t at = 0; at < 5 * kMiB; at += 997) REQUIRE(after.get()[at] == std::byte{3});
  REQUIRE(small.get()[999] == std::byte{4});
  REQUIRE(neighbour[0] == std::byte{3});
  REQUIRE(neighbour[5 * kMiB - 1] == std::byte{3});
  // What was given back is zeros again for everyone, and can be had again.
  REQUIRE(seen[0] == std::byte{0});
  auto again = fill(16 * kMiB, 5);
  REQUIRE(arena->used_bytes() == 3 * kMiB + 4096 + 16 * kMiB + 5 * kMiB + 1024);
  REQUIRE(theirs.data()[*arena->offset_of(again.get(), 1)] == std::byte{5});
  // From here on it is kept as before.
  const std::size_t full_again = resident_bytes(*arena);
  again.reset();
  REQUIRE(fill(16 * kMiB, 6) != nullptr);
  REQUIRE(resident_bytes(*arena) == full_again);
}

TEST_CASE("An emptied cache keeps what is too small for the kernel") {
  const auto arena = Arena::create("test", 4 * kMiB);
  auto block = arena->allocate(32 * 1024);
  std::memset(block.get(), 1, 32 * 1024);
  const auto neighbour = arena->allocate(100);
  block.reset();
  const std::size_t before = resident_bytes(*arena);
  empty_cache();
  REQUIRE(resident_bytes(*arena) == before);
  REQUIRE(arena->allocate(kMiB) != nullptr);
}

TEST_CASE("A block that is left to the peers stays as it is") {
  auto arena = Arena::create("test", 1024 * kMiB);
  auto left = arena->allocate(300 * kMiB);
  std::memset(left.get(), 3, 300 * kMiB);
  const auto other = arena->allocate(100);
  const SharedSegment theirs = SharedSegment::map(UniqueFd(::dup(arena->segment().fd())));
  const std::byte* const seen = theirs.data() + *arena->offset_of(left.get(), 1);
  const auto is_whole = [&] {
    for (std::size_t at = 0; at < 300 * kMiB; at += 4096) {
      if (seen[at] != std::byte{3}) return false;
    }
    return true;
  };
  Arena::leave_to_peers(std::move(left));
  REQUIRE(is_whole());
  empty_cache();
  REQUIRE(is_whole());
  REQUIRE(arena->used_bytes() == 128);
  auto next = arena->allocate(300 * kMiB);
  std::memset(next.get(), 4, 300 * kMiB);
  REQUIRE(is_whole());
  next.reset();
  arena.reset();
  empty_cache();
  REQUIRE(is_whole());
}

TEST_CASE("After a failure nothing that is freed is used again") {
  const auto arena = Arena::create("test", 1024 * kMiB);
  const auto free_before = arena->allocate(4 * kMiB).get();
  auto large = arena->allocate(300 * kMiB);
  std::memset(large.get(), 1, 300 * kMiB);
  std::byte* const late = large.get();  // a peer writes on
  arena->keep_freed();
  REQUIRE(arena->allocate(4 * kMiB).get() == free_before);
  large.reset();
  empty_cache();
  REQUIRE(late[299 * kMiB] == std::byte{1});
  const auto next = arena->allocate(300 * kMiB);
  REQUIRE(next.get() != late);
  REQUIRE(arena->used_bytes() == 300 * kMiB);
  std::memset(next.get(), 2, 300 * kMiB);
  std::memset(late, 9, 300 * kMiB);
  REQUIRE(next.get()[299 * kMiB] == std::byte{2});
}

TEST_CASE("An Arena belongs to the process that made it") {
  const auto arena = Arena::create("test", 600 * kMiB);
  auto block = arena->allocate(300 * kMiB);
  std::memset(block.get(), 9, 300 * kMiB);
  const auto results = libddp::test::fork_ranks(1, [&](int) -> std::string {
    expect(block.get()[5] == std::byte{9}, "the child sees the memory");
    const std::string message = message_of<StateError>([&] { arena->allocate(1); });
    expect(contains(message_of<StateError>([&] { arena->used_bytes(); }), "used_bytes in a child"),
           "no counting either");
    block.reset();  // in the parent's arena this would punch a hole
    const auto own = Arena::create("child", 8 * kMiB);
    std::memset(own->allocate(4 * kMiB).get(), 1, 4 * kMiB);
    empty_cache();  // the child's arena, not the parent's
    expect(resident_bytes(*own) == 0, "its own is empty");
    return message;
  });
  INFO(results[0].text);
  REQUIRE(results[0].ok());
  REQUIRE(contains(results[0].text, "in a child of fork()"));
  REQUIRE(block.get()[299 * kMiB] == std::byte{9});
  REQUIRE(arena->used_bytes() == 300 * kMiB);
}

TEST_CASE("The default reservation fits many ranks") {
  const std::size_t one = Arena::default_reserve_bytes(1);
  REQUIRE(one >= 64 * kMiB);
  REQUIRE(one % (2 * kMiB) == 0);
  REQUIRE(Arena::default_reserve_bytes(4096) * 4096 <= std::size_t{16} << 40);
  REQUIRE(Arena::create("test", one)->segment().size_bytes() == one);
}
