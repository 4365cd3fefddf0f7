// What a writer leaves that dies in the middle: at each instruction, and in each 1/64 of a copy.

#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "libddp/slots/scatter.h"
#include "libddp/slots/slot_memory.h"
#include "tests/slots/stored_tensors.h"
#include "tests/slots/traced_process.h"
#include "tests/support/catch.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Slot 1 has the step before; slot 0 has nothing, or all of the new one.
bool is_sound(const SlotMemory& memory, const std::vector<std::vector<std::byte>>& before,
              const std::vector<std::vector<std::byte>>& after) {
  if (memory.slot(1).whole() != SavedStep{1, 1}) return false;
  const auto holds = [&](int slot, const std::vector<std::vector<std::byte>>& wanted) {
    verify(SlotSource(memory, slot));
    const auto data = memory.slot(slot).data();
    return std::memcmp(data.data(), wanted[0].data(), wanted[0].size()) == 0 &&
           std::memcmp(data.data() + wanted[0].size(), wanted[1].data(), wanted[1].size()) == 0;
  };
  const auto newest = memory.slot(0).whole();
  if (newest && (*newest != SavedStep{2, 2} || !holds(0, after))) return false;
  return holds(1, before);
}

}  // namespace

TEST_CASE("a writer may die behind any instruction", "[slot][crash]") {
  StoredTensors tensors({"w", "m"}, 150);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 1, {.step = 1, .sequence = 1});
  const auto before = tensors.bytes();
  // The slot was whole with an older step: that one must not come back with new bytes.
  tensors.store(memory, 0, {.step = 0, .sequence = 0});
  tensors.fill(9);
  const auto after = tensors.bytes();
  const std::vector<std::span<const std::byte>> sources(after.begin(), after.end());
  const pid_t child =
      traced([&] { memory.slot(0).fill({.step = 2, .sequence = 2}, sources, "{}", 1); });
  long steps = 0;
  bool has_begun = false;
  long num_unsound = 0;
  long num_new = 0;
  int status = 0;
  while (true) {
    ::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
    if (!WIFSTOPPED(status) || ++steps > 2'000'000) break;
    if (!has_begun && memory.slot(0).whole() == SavedStep{0, 0}) continue;
    has_begun = true;
    num_unsound += !is_sound(memory, before, after);
    num_new += memory.slot(0).whole().has_value();
  }
  if (!WIFEXITED(status)) ::kill(child, SIGKILL);
  CAPTURE(steps);
  REQUIRE(WIFEXITED(status));
  REQUIRE(steps > 100);
  REQUIRE(num_unsound == 0);
  REQUIRE(num_new > 0);
  REQUIRE(memory.slot(0).whole() == SavedStep{2, 2});
}

TEST_CASE("a writer may die in any part of a copy", "[slot][crash]") {
  constexpr std::size_t kBytes = 2 * kChunkBytes + 4096;
  StoredTensors tensors({"w", "m"}, kBytes);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 1, {.step = 1, .sequence = 1});
  const auto before = tensors.bytes();
  tensors.fill(9);
  const auto after = tensors.bytes();
  for (int part = 0; part < 64; ++part) {
    const auto results = fork_ranks(1, [&](int) -> std::string {
      // The copy of a page that cannot be read ends the process.
      ::signal(SIGSEGV, [](int) { ::kill(::getpid(), SIGKILL); });
      ::signal(SIGBUS, [](int) { ::kill(::getpid(), SIGKILL); });
      auto* source = static_cast<std::byte*>(
          ::mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      std::memcpy(source, after[0].data(), kBytes);
      std::memcpy(source + kBytes, after[1].data(), kBytes);
      const std::size_t at = 2 * kBytes * static_cast<std::size_t>(part) / 64 / 4096 * 4096;
      ::mprotect(source + at, 4096, PROT_NONE);
      const std::span<const std::byte> sources[] = {{source, kBytes}, {source + kBytes, kBytes}};
      memory.slot(0).fill({.step = 2, .sequence = 2}, sources, "{}", 1 + part % 2);
      return "";
    });
    REQUIRE(results[0].signal == SIGKILL);
    REQUIRE(!memory.slot(0).whole());
    REQUIRE(is_sound(memory, before, after));
  }
}
