#pragma once

// One operation in flight. It keeps its tensors alive until it is done.
//
// Thread rule: any thread may wait, poll and add callbacks; one thread (the backend's) finishes it.
//
//   WorkPtr work = group->all_reduce(tensor, {.op = ReduceOp::Avg}, {.async = true});
//   work->wait();  // throws the operation's own error

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace libddp {

class Work {
 public:
  /// `description` = "all_reduce #42 float32 [8]"; `tensors` are kept alive and are the result.
  Work(std::string description, std::vector<at::Tensor> tensors);

  /// Blocks until the operation is done; throws its error. `timeout` only limits this wait
  /// (TimeoutError; the operation goes on).
  void wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  bool is_completed() const;
  /// Null while it runs and after success.
  std::exception_ptr exception() const;
  /// The output tensors.
  const std::vector<at::Tensor>& result() const { return tensors_; }
  /// Rank that a receive from any source came from; -1 otherwise.
  int source_rank() const;
  const std::string& description() const { return description_; }

  /// Calls `callback` once the operation is done, at once if it is already.
  void on_complete(std::function<void(Work&)> callback);

  /// For backends: ends the operation; `error` null = success.
  void finish(std::exception_ptr error = nullptr, int source_rank = -1);

 private:
  const std::string description_;
  const std::vector<at::Tensor> tensors_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool is_completed_ = false;
  int source_rank_ = -1;
  std::exception_ptr error_;
  std::vector<std::function<void(Work&)>> callbacks_;
};

using WorkPtr = std::shared_ptr<Work>;

}  // namespace libddp
