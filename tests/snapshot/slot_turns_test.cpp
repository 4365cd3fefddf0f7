// Which slot a save takes: with and without copies on their way, and whatever of them arrives.

#include "libddp/snapshot/slot_turns.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <set>

#include "libddp/slots/slot_memory.h"
#include "tests/support/catch.h"

using libddp::SlotMemory;
using libddp::SlotTurns;

namespace {

constexpr int kSpare = SlotMemory::kSpare;

int save(SlotTurns& turns, bool may_use_spare = false) {
  const int slot = turns.candidates(may_use_spare).front();
  turns.take(slot);
  turns.fill(slot);
  return slot;
}

}  // namespace

TEST_CASE("without copies two slots take turns", "[turns]") {
  SlotTurns turns;
  for (int i = 0; i < 6; ++i) {
    REQUIRE(!turns.needs_spare());
    REQUIRE(save(turns) == i % 2);
    REQUIRE(turns.newest() == i % 2);
  }
  // The other one is being stored: the newest gives way, and the one that failed is next.
  REQUIRE(turns.candidates(false) == std::vector<int>{0, 1});
  turns.take(1);
  REQUIRE(turns.newest() == 0);
  REQUIRE(save(turns) == 1);
  turns.restart(1);
  REQUIRE(save(turns) == 0);
  turns.restart(std::nullopt);
  REQUIRE(!turns.newest());
}

TEST_CASE("copies that arrive in time need no spare slot", "[turns]") {
  SlotTurns turns;
  for (int i = 0; i < 6; ++i) {
    REQUIRE(!turns.needs_spare());
    REQUIRE(save(turns) == i % 2);
    REQUIRE(turns.begin_copy());
    REQUIRE(turns.copying() == i % 2);
    turns.end_copy(true);
    REQUIRE(!turns.begin_copy());
  }
}

TEST_CASE("a save on its way and the one before it are taken last", "[turns]") {
  SlotTurns turns;
  save(turns);
  turns.begin_copy();
  turns.end_copy(true);
  save(turns);
  turns.begin_copy();
  REQUIRE(turns.needs_spare());
  // Where there is no memory for it, what arrives next goes before what has arrived.
  REQUIRE(turns.candidates(false) == std::vector<int>{0, 1});
  REQUIRE(turns.candidates(true) == std::vector<int>{kSpare, 0, 1});
  save(turns, true);
  REQUIRE(turns.newest() == kSpare);
  REQUIRE(!turns.begin_copy());
  REQUIRE(!turns.needs_spare());
  REQUIRE(turns.candidates(false) == std::vector<int>{kSpare, 0, 1});
  // It has arrived; the newest is next, and the oldest slot is free.
  turns.end_copy(true);
  REQUIRE(turns.begin_copy());
  REQUIRE(turns.copying() == kSpare);
  REQUIRE(turns.candidates(false) == std::vector<int>{0, 1, kSpare});
  turns.take(kSpare);
  REQUIRE(!turns.copying());
}

TEST_CASE("the newest save stays where the one before it is on its way", "[turns]") {
  SlotTurns turns;
  save(turns);
  turns.begin_copy();
  save(turns);
  REQUIRE(turns.needs_spare());
  REQUIRE(turns.candidates(true) == std::vector<int>{kSpare, 1, 0});
}

TEST_CASE("a copy that failed leaves the one before it, once", "[turns]") {
  SlotTurns turns;
  for (int i = 0; i < 2; ++i) {
    save(turns);
    turns.begin_copy();
    turns.end_copy(i == 0);
  }
  save(turns, true);
  REQUIRE(turns.newest() == kSpare);
  REQUIRE(turns.begin_copy());
  // The one that failed is free.
  REQUIRE(turns.candidates(false) == std::vector<int>{1, 0, kSpare});
  turns.end_copy(false);
  REQUIRE(turns.candidates(false) == std::vector<int>{0, 1, kSpare});
  turns.forget_copies();
  REQUIRE(turns.begin_copy());
}

TEST_CASE("whichever host is lost, the others have a save in common", "[turns]") {
  // Three hosts that copy at their own pace, of which each has its own slots and two saves of the
  // host before it; any moment may be the last one.
  constexpr int kHosts = 3;
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    SlotTurns turns;
    std::array<int, SlotMemory::kSlots> saved{};
    std::array<std::array<int, 2>, kHosts> copies{};
    std::array<bool, kHosts> has_it{};
    int on_its_way = 0;
    int arrived = 0;
    int num_spare = 0;
    const auto begin = [&] {
      if (!turns.begin_copy()) return;
      on_its_way = saved[static_cast<std::size_t>(*turns.copying())];
      has_it.fill(false);
    };
    for (int number = 1; number < 60; ++number) {
      for (std::size_t host = 0; host < kHosts; ++host) {
        if (!turns.copying() || has_it[host] || random() % 3 == 0) continue;
        auto& kept = copies[host];
        *std::min_element(kept.begin(), kept.end()) = on_its_way;
        has_it[host] = true;
      }
      if (turns.copying() && std::count(has_it.begin(), has_it.end(), true) == kHosts) {
        arrived = on_its_way;
        turns.end_copy(true);
        begin();
      }
      num_spare += turns.needs_spare();
      const int slot = turns.candidates(true).front();
      turns.take(slot);
      saved[static_cast<std::size_t>(slot)] = 0;
      // In the middle of a save, when most is at stake.
      for (std::size_t host = 0; arrived > 0 && host < kHosts; ++host) {
        const std::set<int> own(saved.begin(), saved.end());
        const bool is_common = std::any_of(copies[host].begin(), copies[host].end(), [&](int copy) {
          return copy >= arrived && own.contains(copy);
        });
        REQUIRE(is_common);
      }
      turns.fill(slot);
      saved[static_cast<std::size_t>(slot)] = number;
      begin();
    }
    REQUIRE(num_spare == 1);
  }
}
