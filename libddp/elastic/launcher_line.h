#pragma once

// A worker's connection to the launcher that has started it, `libddp run --in-place`: the launcher
// asks the worker to leave its groups, the worker says that it has come, and is told who it is in
// the next epoch.
//
// NOTE [Lines] A Unix socket in the abstract namespace, which LIBDDP_IN_PLACE names; JSON, a line
// each. The launcher takes connections of its own workers only, as the kernel names them.
//   launcher: {"welcome": true}      {"leave": "rank 1 has ended"}      {"go": {...}}
//   worker:   {"ready": "PeerError: ..."}
// From arrive() to the next "go" a worker is in no epoch, and a "leave" that crosses its "ready"
// means nothing.
//
// Thread rule: one thread calls arrive, come and wait; a thread of its own reads, and aborts the
// groups where the launcher asks for it. Lives as long as the process.
//
//   if (auto line = LauncherLine::find()) {
//     line->arrive();
//     line->come("PeerError: rank 1 died");
//     Assignment next = line->wait(Deadline::after(std::chrono::minutes(1)));
//   }

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "libddp/base/deadline.h"
#include "libddp/base/process.h"
#include "libddp/base/unique_fd.h"
#include "libddp/elastic/assignment.h"

namespace libddp {

class LauncherLine {
 public:
  /// The line of this process, made at the first call. Null where no `libddp run --in-place` has
  /// started it: nothing names one, or it is a child of a worker. Throws NetworkError, TimeoutError
  /// where the launcher does not answer.
  static LauncherLine* find();

  ~LauncherLine();

  /// This process leaves its epoch: what asks it to leave is done with.
  void arrive();
  /// It is ready for the next one. `why`: what it came for, in a line; empty at its start.
  void come(const std::string& why);
  /// Throws StateError when the launcher ends the run, TimeoutError.
  Assignment wait(Deadline deadline);
  /// The launcher has asked it to leave its epoch.
  static bool is_asked();

 private:
  explicit LauncherLine(UniqueFd socket);
  static LauncherLine* connect();

  void read();
  void take(const std::string& line);
  void leave(const std::string& reason);

  const UniqueFd socket_;
  const ProcessStamp made_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Under mutex_.
  bool is_welcome_ = false;
  bool is_over_ = false;
  /// It has not been in one either.
  bool is_between_epochs_ = true;
  std::optional<Assignment> next_;
  std::thread thread_;
};

}  // namespace libddp
