#pragma once

// One queue of operations that run one at a time, in the order in which they were issued.
//
// A synchronous operation on an idle queue runs in the caller's own thread (`try_begin`, `end`):
// no hand-off. Everything else is queued for one worker thread, which is started by the first
// queued job. Starting an operation gives it its number, so numbers follow the order of execution.
// Thread rule: any thread.
//
//   if (auto turn = queue.try_begin()) { WorkQueue::Turn end(queue); run(*turn); }
//   else queue.enqueue([&](std::uint64_t sequence) { return [=] { run(sequence); }; });

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace libddp {

class WorkQueue {
 public:
  /// A job reports its own errors (Work::finish); it does not throw. Whoever waits for it may be
  /// interrupted and leave before it runs: it captures values and shared state, nothing of the
  /// waiter's stack.
  using Job = std::function<void()>;

  /// `thread_name` shows in debuggers and top; at most 15 characters.
  explicit WorkQueue(std::string thread_name);
  /// Runs what is still queued, then ends the worker. May run on the worker itself.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  /// Takes the queue if nothing runs and nothing is queued: the number of the operation that the
  /// caller now runs, or nullopt. Must be followed by `end`.
  std::optional<std::uint64_t> try_begin();
  void end() noexcept;

  /// Ends a turn at the end of a scope.
  class Turn {
   public:
    explicit Turn(WorkQueue& queue) : queue_(queue) {}
    ~Turn() { queue_.end(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    WorkQueue& queue_;
  };

  /// While it lives, the job that runs in this thread has done its operation and calls back: its
  /// callbacks may wait for operations that are queued behind it. Needs the WorkQueue no more.
  class CallbackScope {
   public:
    CallbackScope();
    ~CallbackScope();
    CallbackScope(const CallbackScope&) = delete;
    CallbackScope& operator=(const CallbackScope&) = delete;
  };
  /// In a CallbackScope: runs the job that is queued next, which nobody else could do meanwhile.
  /// False if there is none, and everywhere else. For whoever waits for an operation.
  static bool run_next_here();

  /// Queues the job that `make` returns for its number.
  void enqueue(const std::function<Job(std::uint64_t sequence)>& make);

  /// Nothing runs and nothing is queued.
  bool is_idle() const;
  /// Waits until nothing runs and nothing is queued. Returns at once on the worker thread.
  void drain();

  /// Number given last; 0 before the first.
  std::uint64_t sequence() const;

 private:
  struct State;
  struct Here;
  static Here& here();
  static bool run_next(State& state);
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace libddp
