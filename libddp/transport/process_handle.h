#pragma once

// A process of this machine that is watched: by a pidfd, or where the kernel gives none (Linux
// before 5.3, gVisor, a seccomp filter) by its id and when it began. Thread rule: value; const
// functions by any thread.
//
//   const ProcessHandle agent(pid);
//   if (agent.has_ended()) return;
//   poll({agent.fd(), POLLIN});        // and has_ended() from time to time
//   agent.signal(SIGTERM);

#include <sys/types.h>

#include <chrono>
#include <string>

#include "libddp/base/unique_fd.h"

namespace libddp {

class ProcessHandle {
 public:
  /// Of no process.
  ProcessHandle() = default;
  explicit ProcessHandle(pid_t pid);
  /// Of the process at the other end of a Unix socket when the connection was made.
  static ProcessHandle of_peer(int socket);
  /// As where the kernel gives no pidfd.
  static ProcessHandle by_id(pid_t pid);

  /// Whether the process is seen: one of another pid namespace may not be.
  explicit operator bool() const { return pidfd_ || !begin_.empty() || is_gone_; }
  /// Whether it has ended, or there was none; waits so long for it. False where it is not seen.
  bool has_ended(std::chrono::milliseconds wait = std::chrono::milliseconds(0)) const;
  /// Does nothing where it has ended or is not seen.
  void signal(int number) const;
  /// Readable when it has ended; -1 where there is no such thing.
  int fd() const { return pidfd_ ? pidfd_.get() : -1; }

 private:
  /// REQUIRES that it is seen, and no pidfd.
  bool has_ended_by_id() const;

  UniqueFd pidfd_;
  /// Without one:
  pid_t pid_ = 0;
  std::string begin_;
  bool is_gone_ = false;
};

}  // namespace libddp
