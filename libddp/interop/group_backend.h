#pragma once

// A torch process group that moves bytes by itself, without backends below it: a subclass of
// c10d::ProcessGroup, such as those that programs write in Python (fault-tolerant groups, fakes).
//
// Its results may come in the future of its Works instead of in place; they are put into place.
// It lacks what the subclass lacks: such a call fails with torch's text.
// Thread rule: as the group's own.
//
//   if (is_own_group(*group)) backend = c10::make_intrusive<GroupBackend>(group);

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace libddp {

/// Whether calls are the group's own business, and not of a backend below it.
bool is_own_group(const c10d::ProcessGroup& group);

class GroupBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkHandle = c10::intrusive_ptr<c10d::Work>;

  explicit GroupBackend(c10::intrusive_ptr<c10d::ProcessGroup> group);

  const std::string getBackendName() const override { return group_->getBackendName(); }
  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                       const c10d::AllgatherOptions& options) override;
  WorkHandle alltoall_base(at::Tensor& output, at::Tensor& input,
                           std::vector<std::int64_t>& output_splits,
                           std::vector<std::int64_t>& input_splits,
                           const c10d::AllToAllOptions& options) override;
  WorkHandle send(Tensors& tensors, int to, int tag) override;
  WorkHandle recv(Tensors& tensors, int from, int tag) override;
  WorkHandle recvAnysource(Tensors& tensors, int tag) override;
  WorkHandle barrier(const c10d::BarrierOptions& options) override;

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace libddp
