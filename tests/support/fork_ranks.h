#pragma once

// Ranks as forked processes: for shared memory, signals and crashes.
//
//   auto results = fork_ranks(2, [&](int rank) -> std::string {
//     if (rank == 1) ::kill(::getpid(), SIGKILL);
//     return message_of<PeerError>([&] { group.barrier(); });
//   });
//   REQUIRE(results[0].ok());
//   REQUIRE(results[1].signal == SIGKILL);

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace libddp::test {

struct RankResult {
  /// Exit status; -1 where a signal ended the process. 1 = f threw.
  int exit_code = -1;
  /// Signal that ended the process; 0 for none.
  int signal = 0;
  /// The process was still running at the deadline and was killed.
  bool timed_out = false;
  /// What f returned, or the message of what it threw.
  std::string text;

  bool ok() const { return exit_code == 0; }
};

/// Runs f(rank) in one child per rank and collects what became of them. No child outlives the call,
/// nor this process. Call it with no other threads running that hold locks f needs.
std::vector<RankResult> fork_ranks(int num_ranks, const std::function<std::string(int)>& f,
                                   std::chrono::seconds deadline = std::chrono::seconds(120));

}  // namespace libddp::test
