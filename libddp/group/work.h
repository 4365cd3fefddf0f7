#pragma once

// One operation in flight. It keeps its tensors alive until it is done.
//
// Its callbacks run, and what they hold ends, before anybody else learns that it is done: who has
// waited may take down what they use (a profiler is stopped). To the callbacks themselves it is
// done.
// Thread rule: any thread may wait, poll and add callbacks; one thread (the backend's) finishes it.
//
//   WorkPtr work = group->all_reduce(tensor, {.op = ReduceOp::Avg}, {.async = true});
//   work->wait();  // throws the operation's own error

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/op_description.h"

namespace libddp {

class Work;
using WorkPtr = std::shared_ptr<Work>;

class Work {
 public:
  /// `description` = "all_reduce #42 float32 [8]"; `tensors` are kept alive and are the result.
  Work(std::string description, std::vector<at::Tensor> tensors);
  /// As above; the text is made only when somebody asks for it.
  Work(const OpDescription& operation, std::uint64_t sequence, std::vector<at::Tensor> tensors);
  /// One that is already done, successfully.
  static WorkPtr finished(const OpDescription& operation, std::uint64_t sequence,
                          std::vector<at::Tensor> tensors);
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Blocks until the operation is done; throws its error. `timeout` only limits this wait
  /// (TimeoutError; the operation goes on).
  /// Of a stream-ordered operation: does not block, but lets the current stream of this thread
  /// wait.
  virtual void wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  /// Of a stream-ordered operation that nobody wants any more: the current stream of this thread
  /// waits for its end, well or not, before what uses its memory next. Else nothing.
  virtual void order_stream() noexcept {}
  /// Whether it is an operation on device tensors, which is done in the order of a stream: who has
  /// waited may launch work in the current stream, and may not look at the results from the host.
  virtual bool is_stream_ordered() const { return false; }
  /// Where a stream-ordered operation runs; else the CPU.
  virtual c10::Device device() const { return c10::kCPU; }
  /// Blocks until the results are there for the host too. As `wait` where they are after that.
  virtual void synchronize() { wait(); }
  virtual bool is_completed() const;
  /// Null while it runs and after success.
  std::exception_ptr exception() const;
  /// The output tensors.
  const std::vector<at::Tensor>& result() const { return tensors_; }
  /// Rank that a receive from any source came from; -1 otherwise.
  int source_rank() const;
  std::string description() const;
  /// When it ended, on the clock of monotonic_ns(), whoever waited for it when. 0 while it runs,
  /// and where it ran inside the call that returned it: its end was that of the call.
  std::int64_t finished_ns() const { return is_finished() ? finished_ns_ : 0; }

  /// Calls `callback` once the operation is done, at once if it is already; otherwise in the
  /// thread that finishes it, before waiters wake, so it must not wait for one of them. It may use
  /// the group and wait for its operations: those queued behind this one then run in the callback's
  /// thread, in their order. What it throws is logged, because nobody is there to catch it.
  virtual void on_complete(std::function<void(Work&)> callback);

  /// For backends: ends the operation, once; `error` null = success.
  void finish(std::exception_ptr error = nullptr, int source_rank = -1);

 protected:
  /// Whether `finish` has been called, or its callbacks run in this thread.
  bool is_finished() const;
  /// Throws the TimeoutError of a wait that was limited; the operation goes on.
  [[noreturn]] void refuse_to_wait(std::chrono::milliseconds timeout) const;

 private:
  void block(std::optional<std::chrono::milliseconds> timeout);
  void run_callback(const std::function<void(Work&)>& callback) noexcept;

  const std::string text_;
  const OpDescription operation_;
  const std::uint64_t sequence_ = 0;
  const std::vector<at::Tensor> tensors_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::atomic<bool> is_completed_{false};
  int source_rank_ = -1;
  std::int64_t finished_ns_ = 0;
  std::exception_ptr error_;
  std::vector<std::function<void(Work&)>> callbacks_;
};

}  // namespace libddp
