#pragma once

// libddp's Work behind c10d's: what torch's users wait for, poll and chain.
//
// Futures complete in the group's callback thread, so that a callback may use the group again.
// Those of operations on a device are complete when these have been launched, as torch's are: who
// waits for one, and its callbacks, run in streams that wait for the operation. The profiler's
// event is the group's own (group/profiler_event.h). Thread rule: as libddp::Work; any thread.
//
//   auto work = c10::make_intrusive<C10dWork>(c10d::OpType::ALLREDUCE, *group);
//   work->attach(group->all_reduce(t, {}, {.async = true}), {{t}});

#include <cstdint>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "libddp/group/process_group.h"
#include "libddp/interop/callback_thread.h"

namespace libddp {

class C10dWork final : public c10d::Work {
 public:
  /// An operation of `group`, before it is issued; then, in the same thread, `attach`.
  C10dWork(c10d::OpType type, const ProcessGroup& group);

  /// `results`: one list for most operations, several for a gather of several tensors.
  void attach(WorkPtr work, std::vector<std::vector<at::Tensor>> results);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  /// Of an operation on a device: lets the current stream wait for it.
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void complete_in_stream();

  const ProcessGroup* const group_;
  const std::uint64_t sequence_;
  /// Null for operations on a device.
  std::shared_ptr<CallbackThread> callbacks_;
  WorkPtr work_;
  std::vector<std::vector<at::Tensor>> results_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace libddp
