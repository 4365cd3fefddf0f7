#pragma once

// A job of its own for a test, whose keeper ends with it.
//
//   const KeptJob job;                       // memory only
//   const KeptJob stored(folder.path());     // with a folder
//   auto snapshot = Snapshot::create(group, job.options());

#include <signal.h>
#include <sys/types.h>

#include <string>

#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/snapshot/snapshot.h"
#include "tests/support/wait_until.h"

namespace libddp::test {

/// "pid" of the keeper's status; 0 where there is none.
inline pid_t keeper_pid(const std::string& status) {
  const std::size_t at = status.find("\"pid\":");
  return at == std::string::npos ? 0 : std::stoi(status.substr(at + 6));
}

inline bool is_zombie(pid_t pid) { return process_state(pid) == 'Z'; }

class KeptJob {
 public:
  explicit KeptJob(std::string folder = "")
      : folder_(std::move(folder)), run_(folder_.empty() ? "test-" + random_hex(8) : "") {}

  /// It lingers for as long as a test may take, and not longer.
  SnapshotOptions options() const {
    return {.folder = folder_, .run = run_, .linger = std::chrono::seconds(10)};
  }

 private:
  const std::string folder_;
  const std::string run_;
};

}  // namespace libddp::test
