#pragma once

// Two hosts of one run, each with a keeper, in one process.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/keeper/keeper_client.h"
#include "libddp/slots/scatter.h"
#include "tests/keeper/keeper_thread.h"
#include "tests/support/expect.h"

namespace libddp::test {

using Sequences = std::vector<std::uint64_t>;

inline std::shared_ptr<const RunKey> key_of(char letter) {
  return RunKey::from_bytes(std::string(32, letter));
}

/// How long a keeper waits for another that sends nothing: longer than a busy machine stands still.
/// The short one is for tests in which that time passes.
constexpr std::chrono::milliseconds kPatience{10'000};
constexpr std::chrono::milliseconds kShortPatience{2'000};

/// Two hosts of one run: rank 0 on the first, rank 1 on the second, whose saves the first fetches.
class TwoHosts {
 public:
  explicit TwoHosts(std::size_t bytes = 5000,
                    Keeper::Options options = {.run = "", .patience = kPatience})
      : run("test-" + random_hex(8)), remote(run, 1, 2, 3, bytes) {
    set_log_level(LogLevel::Off);
    options.run = run;
    options.host = "a";
    first_ = std::make_unique<KeeperThread>(options);
    options.host = "b";
    second_ = std::make_unique<KeeperThread>(options);
    here.emplace(worker(*first_));
    there.emplace(worker(*second_));
    own_address = here->listen("127.0.0.1", *key_of('k'));
    address = there->listen("127.0.0.1", *key_of('k'));
    there->put(remote.memory, std::nullopt);
  }
  ~TwoHosts() { set_log_level(LogLevel::Warn); }

  void pull(std::uint64_t sequence, const std::string& from = "") {
    here->pull(from.empty() ? address : from, 1, 3, sequence);
    here->wait_pull(1, 3, sequence, soon());
  }
  std::string failed_pull(std::uint64_t sequence, const std::string& from = "") {
    return message_of<SnapshotError>([&] { pull(sequence, from); });
  }
  /// What the first host has of rank 1, whole and checked.
  std::vector<std::uint64_t> replicas() {
    std::vector<std::uint64_t> found;
    for (UniqueFd& fd : here->get()) {
      const SlotMemory memory = SlotMemory::open(std::move(fd));
      for (int i = 0; i < SlotMemory::kSlots; ++i) {
        const auto saved = memory.slot(i).whole();
        if (!saved || memory.identity().rank != 1) continue;
        verify(SlotSource(memory, i));
        found.push_back(saved->sequence);
      }
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  void end_first() {
    here.reset();
    first_.reset();
  }
  void end_second() { second_.reset(); }

  const std::string run;
  Rank remote;
  std::optional<KeeperClient> here, there;
  std::string address, own_address;

 private:
  std::unique_ptr<KeeperThread> first_, second_;
};

}  // namespace libddp::test
