#pragma once

// What torch.profiler sees of an operation of a ProcessGroup: one event, `libddp:all_reduce`, with
// the shapes of what goes in. It begins with the call and ends with the operation, in whichever
// thread that is. Operations that a thread issues while it issues another are parts of that one,
// and no events of their own. Costs one look at a list where no profiler runs. Thread rule: one
// thread makes it and ends it.
//
//   ProfilerEvent event(call.description, inputs);
//   return event.end_with(backend->all_reduce(std::move(call), tensor, 1.0));

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>

#include "libddp/base/op_description.h"
#include "libddp/group/work.h"

namespace libddp {

class ProfilerEvent {
 public:
  ProfilerEvent(const OpDescription& operation, at::ArrayRef<at::Tensor> inputs) {
    if (auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) [[unlikely]]
      begin(std::move(*observers), operation, inputs);
  }

  ~ProfilerEvent() {
    if (event_) [[unlikely]]
      is_issuing = false;
  }
  ProfilerEvent(const ProfilerEvent&) = delete;
  ProfilerEvent& operator=(const ProfilerEvent&) = delete;

  /// The event ends with the work; it has, where the work is done.
  WorkPtr end_with(WorkPtr work) {
    if (event_) [[unlikely]]
      end_when_done(*work);
    return work;
  }

 private:
  void begin(at::StepCallbacks observers, const OpDescription& operation,
             at::ArrayRef<at::Tensor> inputs);
  void end_when_done(Work& work);

  /// Whether this thread has an event that is not a part.
  static thread_local bool is_issuing;

  /// Null where no profiler runs, and for a part.
  std::shared_ptr<at::RecordFunction> event_;
};

}  // namespace libddp
