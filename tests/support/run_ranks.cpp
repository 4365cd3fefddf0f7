#include "tests/support/run_ranks.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace libddp::test {
namespace {

struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> done;
  int num_done = 0;
  std::exception_ptr first_error;
};

void run_one(Progress& progress, const std::function<void(int)>& f, int rank) {
  std::exception_ptr error;
  try {
    f(rank);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(progress.mutex);
  if (error && !progress.first_error) progress.first_error = error;
  progress.done[static_cast<std::size_t>(rank)] = true;
  ++progress.num_done;
  progress.changed.notify_all();
}

[[noreturn]] void give_up(const Progress& progress) {
  std::fprintf(stderr, "run_ranks: past the deadline, still running:");
  for (std::size_t rank = 0; rank < progress.done.size(); ++rank) {
    if (!progress.done[rank]) std::fprintf(stderr, " %zu", rank);
  }
  std::fprintf(stderr, "\n");
  ::_exit(124);
}

}  // namespace

void run_ranks(int num_ranks, const std::function<void(int)>& f, std::chrono::seconds deadline) {
  Progress progress;
  progress.done.resize(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&progress, &f, rank] { run_one(progress, f, rank); });
  }
  {
    std::unique_lock lock(progress.mutex);
    if (!progress.changed.wait_for(lock, deadline,
                                   [&] { return progress.num_done == num_ranks; })) {
      give_up(progress);
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (progress.first_error) std::rethrow_exception(progress.first_error);
}

}  // namespace libddp::test
