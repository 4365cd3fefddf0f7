#pragma once

// The keeper of a job on this host, started where there is none yet. Thread rule: free functions;
// any thread.
//
//   KeeperClient keeper = connect_or_start({.run = "job 7"}, {.is_worker = true, .rank = 0},
//                                          Deadline::after(std::chrono::seconds(30)));

#include <chrono>
#include <string>

#include "libddp/base/deadline.h"
#include "libddp/keeper/keeper_client.h"

namespace libddp {

struct KeeperStart {
  std::string run;
  /// So long it stays with memories that nobody is connected for.
  std::chrono::milliseconds linger{60'000};
  /// The program; empty: what LIBDDP_KEEPER names, else the one installed beside the library.
  std::string program = {};
};

/// Several processes may do it at once: one keeper comes of it. It is a process in a session of its
/// own without the caller's output; what it has to say it says to its clients, or into the file
/// that LIBDDP_KEEPER_LOG names. Throws StateError if it cannot be started, TimeoutError, and what
/// KeeperClient throws.
KeeperClient connect_or_start(const KeeperStart& start, const KeeperClient::Role& role,
                              Deadline deadline);

/// Process that started this one as a worker of a job: its launcher's; 0 without a launcher.
pid_t launching_agent();

}  // namespace libddp
