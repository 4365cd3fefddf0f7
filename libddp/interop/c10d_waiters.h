#pragma once

// Threads that wait for the works of another c10d backend, which knows no callback for all of them.
//
// Each wait has a thread of its own while it lasts, because nothing is known of the order in which
// messages end; threads are used again. They outlive this object where the other backend does not
// let go (an operation without a partner ends with its own timeout). Those that only let go of what
// a wait has held are waited for: that may be a tensor that Python knows.
// Thread rule: any thread; whoever destroys one, or settles all, holds no interpreter lock.
//
//   waiters.watch([work] { work->wait(); }, [](std::exception_ptr error) { ... });
//   waiters.drain([&] { return deadline.expired(); });

#include <exception>
#include <functional>
#include <memory>

namespace libddp {

class C10dWaiters {
 public:
  C10dWaiters();
  ~C10dWaiters();
  C10dWaiters(const C10dWaiters&) = delete;
  C10dWaiters& operator=(const C10dWaiters&) = delete;

  /// Calls `wait`, then `done` with what it threw (null = nothing), in a thread; `done` must not
  /// throw. Both are destroyed in that thread.
  void watch(std::function<void()> wait, std::function<void(std::exception_ptr)> done);

  /// Nothing waits any more.
  bool is_idle() const;
  /// Until all are done, or `gives_up` says so; interruptible. Returns at once in a thread of this
  /// object.
  void drain(const std::function<bool()>& gives_up);
  /// Before an interpreter goes away, without which nobody can free what it knows: until no thread
  /// of any object lets go of anything, for a second at most. What ends its wait later keeps what
  /// it holds for ever. Does nothing in a forked child, which has no threads.
  static void settle_all();

 private:
  struct State;
  struct Registry;
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace libddp
