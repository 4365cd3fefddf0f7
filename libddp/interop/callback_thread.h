#pragma once

// The thread that completes futures.
//
// A future runs its callbacks in the thread that completes it. They may be Python, which waits for
// the interpreter lock, and may issue the next collective and wait for it: in a group's own thread
// that would be a deadlock. So all futures of the process are completed here, in order.
//
// Thread rule: any thread may post. The thread starts with the first post and lives until `stop`,
// which the embedding program calls before its interpreter goes away; a post after that runs in the
// caller. A forked child starts with no thread.
//
//   CallbackThread::instance().post([future] { future->markCompleted(value); });

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace libddp {

class CallbackThread {
 public:
  static CallbackThread& instance();

  /// Runs `task` later; tasks do not throw.
  void post(std::function<void()> task);

  /// Runs what is posted, then ends the thread. The caller must not hold what tasks wait for.
  void stop();

 private:
  CallbackThread() = default;
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
  bool is_stopped_ = false;
};

}  // namespace libddp
