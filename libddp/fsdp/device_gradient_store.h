#pragma once

// GradientStore on a device: what autograd has written is what the collective reads.
//
// NOTE [Gradients where they are]
// The gradient of a parameter whose rows divide evenly over the ranks is the ranks' blocks of it
// one behind the other. So a reduce-scatter of each, all of a unit grouped to one operation, reads
// autograd's tensors and writes the shards of the own block: nothing is copied, and a unit's
// gradients need no memory beside autograd's. Where a gradient has another dtype than it travels
// in, or its rows do not divide evenly, one multi-tensor copy puts those that need it into memory
// of the pass. Without sharding `.grad` keeps autograd's tensors, which the replicas average in
// place.
//
// Gradients may come in any stream: the reduction waits for each of them, and each waits for the
// reduction before the memory goes back to it. Replicas average on their group's stream, behind the
// first reduction and beside the computation. Whether other ranks have used a parameter is asked of
// the device only for one that this rank has not used.
// Where parameters are offloaded the averages are copied to the host in a stream of its own, as
// soon as the reduction has ended, into what `.grad` will show; without sharding too, from one
// block. See NOTE [Offloading]. Thread rule: as GradientStore; any stream.
//
//   DeviceGradientStore gradients(spec, accumulated);

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/fsdp/device_buffers.h"
#include "libddp/fsdp/gradient_store.h"
#include "libddp/fsdp/stream_users.h"

namespace libddp {

class DeviceGradientStore final : public GradientStore {
 public:
  DeviceGradientStore(const FlatSpec& spec, AccumulatedGradients& accumulated);

  void add(const at::Tensor& grad, std::size_t index) override;
  void begin_reduction(const GradientReduction& reduction) override;
  const at::Tensor& whole() override;
  const at::Tensor& average() override;
  WorkPtr reduce(const ReduceOptions& first, const ReduceOptions& second,
                 const std::string& label) override;
  void collect(Work& work, const ReduceOptions& second, const std::string& label) override;
  void end_reduction() override;
  bool was_used(std::size_t index) override;
  bool was_any_used() override;
  void install(const std::vector<bool>& averaged) override;
  void abandon() override;

 private:
  /// Elements of a gradient as it travels: with room for world_size of its largest shards.
  std::int64_t sent_numel(std::size_t index) const;
  bool is_ready(std::size_t index) const;
  void make_ready(const std::vector<bool>& averaged);
  void begin_notes();
  /// Averages go to the host from there.
  void begin_block();
  void pack(const std::vector<bool>& averaged);
  void send_to_host(Work* reduction);
  WorkPtr reduce_on_device(const ReduceOptions& first, const ReduceOptions& second,
                           const CallOptions& options);
  WorkPtr reduce_scatter(const ReduceOptions& first, const CallOptions& options);
  WorkPtr all_reduce(const ReduceOptions& first, const CallOptions& options);
  WorkPtr average_replicas(Work& first, const ReduceOptions& second, const CallOptions& options);
  void install_whole(const std::vector<bool>& averaged);
  void forget();

  /// By parameter: as they came, and from begin_reduction on as they travel.
  std::vector<at::Tensor> grads_;
  /// Which of them this rank has computed.
  std::vector<bool> came_;
  StreamUsers streams_;
  /// The own block of averages, in the dtype of the reduction; undefined where nothing is sharded
  /// or offloaded.
  at::Tensor average_;
  /// Of what is offloaded: the memory of `average_`, and the block on the host that it is copied
  /// to, in the dtype of `.grad`.
  const std::shared_ptr<DeviceBuffers> buffers_;
  std::optional<DeviceBuffer> on_device_;
  at::Tensor on_host_;
  /// A word about each parameter, other than zero where it was used, for each rank; undefined where
  /// nobody asks. The constant is that of a rank that has used all.
  at::Tensor notes_;
  at::Tensor all_used_;
  /// See whole().
  at::Tensor blocks_;
  /// Where the second of two reductions waits for the first.
  std::optional<c10::Stream> between_;
};

}  // namespace libddp
