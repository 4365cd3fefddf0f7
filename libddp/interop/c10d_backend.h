#pragma once

// libddp as a backend of torch.distributed: DDP, FSDP, DCP, DTensor, Accelerate and everything else
// written against c10d runs on a libddp::ProcessGroup.
//
// Lists of several tensors mean what they mean on Gloo: an all-reduce reduces over them too, a
// gather gathers from each. Works are asynchronous unless the options say otherwise. Between
// startCoalescing and endCoalescing sends and receives are collected and run as one batch, in which
// no order can deadlock.
// Thread rule: as ProcessGroup; coalescing belongs to one thread at a time.
//
//   auto backend = C10dBackend::create(store, {.rank = 0, .world_size = 2});
//   backend->allreduce(tensors)->wait();

#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

class C10dMembership;
class C10dReconfigurer;

class C10dBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  static constexpr const char* kName = "libddp";

  /// Joins over `store`, whose keys belong to this group alone. Blocks until all ranks have come.
  static c10::intrusive_ptr<C10dBackend> create(c10::intrusive_ptr<c10d::Store> store,
                                                ProcessGroup::Options options);
  /// Meets nobody: it has no members until reconfigure(), as torch's enable_reconfigure=True wants
  /// it. Of `options`, rank and world size are what is shown before; of `store` only its address is
  /// used.
  static c10::intrusive_ptr<C10dBackend> create_reconfigurable(
      const c10::intrusive_ptr<c10d::Store>& store, ProcessGroup::Options options);
  C10dBackend(c10::intrusive_ptr<c10d::Store> store, Group group);
  explicit C10dBackend(std::unique_ptr<C10dReconfigurer> reconfigurer);
  ~C10dBackend() override;

  /// Throws StateError before the first reconfigure and after one that failed.
  Group group() const;
  /// The group behind a backend of this class; null for others, and while it has no members.
  static Group group_of(const c10::intrusive_ptr<c10d::Backend>& backend);

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // the group counts from 0 on every rank
  std::uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  /// For init_process_group(device_id=...): the communicator of that device is made now, and not by
  /// the first collective; a collective.
  void eagerConnectSingleDevice(at::Device device) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsSplitting() const override { return true; }
  /// For torch.distributed.split_group: over those of this group's ranks, in that order; null on a
  /// rank that is not among them. With the name and the timeout of `opts`.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  void abort() override;
  void shutdown() override;

  bool is_reconfigurable() const { return reconfigurer_ != nullptr; }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // torch's fault-tolerance API (docs/c10d.md), for groups of create_reconfigurable.
  bool supportsReconfigure() const override { return is_reconfigurable(); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  /// Blocks until all members have come; the Work that it returns is done. Sets rank and size.
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

  using WorkHandle = c10::intrusive_ptr<c10d::Work>;

  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkHandle allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkHandle allreduce_coalesced(Tensors& tensors,
                                 const c10d::AllreduceCoalescedOptions& opts) override;
  WorkHandle reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;

  WorkHandle allgather(TensorLists& outputs, Tensors& inputs,
                       const c10d::AllgatherOptions& opts) override;
  WorkHandle _allgather_base(at::Tensor& output, at::Tensor& input,
                             const c10d::AllgatherOptions& opts) override;
  WorkHandle allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& opts) override;
  WorkHandle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) override;
  WorkHandle gather(TensorLists& outputs, Tensors& inputs,
                    const c10d::GatherOptions& opts) override;
  WorkHandle scatter(Tensors& outputs, TensorLists& inputs,
                     const c10d::ScatterOptions& opts) override;

  WorkHandle reduce_scatter(Tensors& outputs, TensorLists& inputs,
                            const c10d::ReduceScatterOptions& opts) override;
  WorkHandle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::ReduceScatterOptions& opts) override;
  WorkHandle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                             const c10d::ReduceScatterOptions& opts) override;
  WorkHandle alltoall_base(at::Tensor& output, at::Tensor& input,
                           std::vector<std::int64_t>& output_splits,
                           std::vector<std::int64_t>& input_splits,
                           const c10d::AllToAllOptions& opts) override;
  WorkHandle alltoall(Tensors& outputs, Tensors& inputs,
                      const c10d::AllToAllOptions& opts) override;

  WorkHandle send(Tensors& tensors, int target, int tag) override;
  WorkHandle recv(Tensors& tensors, int source, int tag) override;
  WorkHandle recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkHandle endCoalescing() override;
  /// Instead of it, where an operation was refused: what was to be sent or received is not.
  void drop_batch();

  WorkHandle barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  /// Issues an operation between the profiler's begin and end and wraps its work.
  template <class Issue>
  WorkHandle run(c10d::OpType type, TensorLists results, Issue&& issue);
  void check_reconfigurable() const;
  WorkHandle exchange_one(Tensors& tensors, Exchange::Direction direction, int peer, int tag);

  /// What startCoalescing opened.
  struct Batch {
    std::vector<Exchange> parts;
    std::vector<WorkPtr> works;
  };

  const std::unique_ptr<C10dMembership> membership_;
  /// Null in a group whose members stay.
  const std::unique_ptr<C10dReconfigurer> reconfigurer_;
  std::mutex batch_mutex_;
  std::optional<Batch> batch_;
};

}  // namespace libddp
