#pragma once

// A keeper in a thread of the test, ranks with tensors, and processes that connect to it.
//
//   KeeperThread keeper;
//   Rank rank(keeper.run, 0, 1);
//   rank.save(5, 0);
//   worker(keeper).put(rank.memory, std::nullopt);

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/random.h"
#include "libddp/keeper/keeper.h"
#include "libddp/keeper/keeper_client.h"
#include "libddp/slots/slot_memory.h"
#include "tests/slots/stored_tensors.h"
#include "tests/support/soon.h"

namespace libddp::test {

/// A keeper in a thread, which ends with the test.
class KeeperThread {
 public:
  explicit KeeperThread(std::chrono::milliseconds linger = std::chrono::seconds(30),
                        std::string name = "test-" + random_hex(8))
      : KeeperThread(Keeper::Options{
            .run = std::move(name), .linger = linger, .grace = std::chrono::milliseconds(300)}) {}
  explicit KeeperThread(const Keeper::Options& options)
      : run(options.run), host(options.host), keeper_(options), thread_([this] {
          keeper_.run();
          has_ended = true;
        }) {}
  ~KeeperThread() {
    keeper_.stop();
    thread_.join();
  }

  const std::string run;
  const std::string host;
  std::atomic<bool> has_ended{false};

 private:
  Keeper keeper_;
  std::thread thread_;
};

/// A rank's tensors, and its memory.
struct Rank {
  Rank(const std::string& run, int rank, int world_size, std::uint64_t generation = 0,
       std::size_t bytes = 5000)
      : tensors({"w"}, bytes),
        memory(SlotMemory::create(
            tensors.layout(),
            {.run = run, .rank = rank, .world_size = world_size, .generation = generation}, 64)) {}

  void save(std::uint64_t sequence, int slot) {
    tensors.fill(static_cast<unsigned>(sequence));
    tensors.store(memory, slot, {.step = static_cast<int>(10 * sequence), .sequence = sequence});
  }

  StoredTensors tensors;
  SlotMemory memory;
};

/// A child that runs `work` and ends with this process at the latest.
template <class Work>
pid_t forked(Work&& work) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGTERM, SIG_DFL);  // Catch2 would report a failure
  try {
    work();
  } catch (...) {
  }
  ::_exit(0);
}

inline KeeperClient worker(const KeeperThread& keeper) {
  return {keeper.run, {.is_worker = true, .host = keeper.host}, soon()};
}

}  // namespace libddp::test
