#pragma once

// Where the Python threads of this process are, as text in the form of faulthandler's.
//
// Thread rule: any thread, with the interpreter lock or without.
//
//   static auto* const stacks = new PythonStacks();   // never freed: its reader may outlive main
//   std::string text = stacks->read(std::chrono::milliseconds(200));
//   stacks->stop();   // before the interpreter goes away, without its lock

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace libddp {

class PythonStacks {
 public:
  /// The stacks of a moment when no thread runs Python code: a walk beside a running thread may
  /// find a broken chain of calls or end the process. Where the interpreter lock is not to be had
  /// within `limit` (a thread hangs in foreign code with it, or the machine is busy), a copy of the
  /// process is walked, in which nothing runs and whose end harms nobody; that takes up to `limit`
  /// once more. Empty after stop(), in a forked child and, of such a copy, where Python does not
  /// export its function for it (from 3.13 on).
  std::string read(std::chrono::milliseconds limit);
  /// Waits for a reader that waits for the interpreter lock; not in a forked child, which has none.
  void stop();

 private:
  void read_with_lock();

  std::mutex mutex_;
  std::condition_variable changed_;
  const pid_t pid_ = ::getpid();
  bool is_reading_ = false;
  bool is_stopped_ = false;
  std::string text_;
};

}  // namespace libddp
