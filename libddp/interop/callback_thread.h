#pragma once

// The thread that completes a group's futures.
//
// A future runs its callbacks in the thread that completes it. They may be Python, which waits for
// the interpreter lock, and may issue the next collective and wait for it: in a group's own thread
// that would be a deadlock. So the futures of a group are completed here, in the order of the
// group's operations. One thread per group, because a callback that waits for the group's other
// ranks must not hold up another group's callbacks, for which those ranks may be waiting. What a
// callback issues is completed by the next thread of a short chain, so that the callback may wait
// for it.
//
// Thread rule: any thread may post. The thread starts with the first post. Nobody joins it while
// holding the interpreter lock: `release` lets it end by itself, and only `stop_all`, which the
// embedding program calls before its interpreter goes away, waits.
//
//   auto callbacks = CallbackThread::of(group.get());
//   callbacks->post([future] { future->markCompleted(value); });

#include <functional>
#include <memory>

namespace libddp {

class ProcessGroup;

class CallbackThread {
 public:
  /// The group's thread, or the one after it where a callback of the group asks; made when first
  /// asked for.
  static std::shared_ptr<CallbackThread> of(const ProcessGroup* group);
  /// The group is gone: its thread runs what is posted, then ends.
  static void release(const ProcessGroup* group);
  /// Ends all threads, after what is posted; later posts run in the caller. Does nothing in a
  /// forked child, which has no threads. The caller must not hold what tasks wait for.
  static void stop_all();

  /// `depth`: place in the group's chain.
  CallbackThread(const ProcessGroup* group, int depth);
  ~CallbackThread();
  CallbackThread(const CallbackThread&) = delete;
  CallbackThread& operator=(const CallbackThread&) = delete;

  /// Runs `task` later, after those posted before; tasks do not throw.
  void post(std::function<void()> task);

 private:
  struct Queue;
  static void run(const std::shared_ptr<Queue>& queue);
  void stop_and_join();

  /// Shared with the thread, which may outlive this object.
  const std::shared_ptr<Queue> queue_;
};

}  // namespace libddp
