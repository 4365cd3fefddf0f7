#include "libddp/interop/group_backend.h"

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <typeinfo>
#include <utility>

#include "libddp/interop/c10d_failure.h"

namespace libddp {
namespace {

using WorkHandle = GroupBackend::WorkHandle;

/// Waits for a Work of the group, then puts its result into place.
class ResultWork final : public c10d::Work {
 public:
  ResultWork(WorkHandle work, at::Tensor place)
      : work_(std::move(work)), place_(std::move(place)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    work_->wait(timeout);
    if (const auto future = result_of(*work_)) {
      future->waitAndThrow();
      put(c10d::detail::parseCppCommHookResult(future->value()));
    }
    return true;
  }

 private:
  /// Null where it has none: then the result is in place.
  static c10::intrusive_ptr<c10::ivalue::Future> result_of(c10d::Work& work) {
    try {
      return work.getFuture();
    } catch (const c10::Error& error) {
      if (!is_unsupported(error)) throw;
      return nullptr;
    }
  }

  void put(const at::Tensor& result) {
    if (!result.defined() || result.const_data_ptr() == place_.const_data_ptr()) return;
    const c10::NoGradGuard no_grad;
    place_.copy_(result.reshape(place_.sizes()));
  }

  const WorkHandle work_;
  at::Tensor place_;
};

}  // namespace

bool is_own_group(const c10d::ProcessGroup& group) {
  return typeid(group) != typeid(c10d::ProcessGroup);
}

GroupBackend::GroupBackend(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : c10d::Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}

WorkHandle GroupBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return group_->broadcast(tensors, options);
}

WorkHandle GroupBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return c10::make_intrusive<ResultWork>(group_->allreduce(tensors, options), tensors.front());
}

WorkHandle GroupBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) {
  return group_->allgather(outputs, inputs, options);
}

// Deprecated in torch 2.15 for a name that 2.11 lacks; Python's groups answer to both.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
WorkHandle GroupBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<std::int64_t>& output_splits,
                                       std::vector<std::int64_t>& input_splits,
                                       const c10d::AllToAllOptions& options) {
  return group_->alltoall_base(output, input, output_splits, input_splits, options);
}
#pragma GCC diagnostic pop

WorkHandle GroupBackend::send(Tensors& tensors, int to, int tag) {
  return group_->send(tensors, to, tag);
}

WorkHandle GroupBackend::recv(Tensors& tensors, int from, int tag) {
  return group_->recv(tensors, from, tag);
}

WorkHandle GroupBackend::recvAnysource(Tensors& tensors, int tag) {
  return group_->recvAnysource(tensors, tag);
}

WorkHandle GroupBackend::barrier(const c10d::BarrierOptions& options) {
  return group_->barrier(options);
}

}  // namespace libddp
