#include "libddp/fsdp/gradient_store.h"

#include <ATen/TensorOperators.h>

#include "libddp/fsdp/device_gradient_store.h"
#include "libddp/fsdp/host_gradient_store.h"

namespace libddp {

std::unique_ptr<GradientStore> GradientStore::make(const FlatSpec& spec,
                                                   const std::shared_ptr<BufferPool>& pool,
                                                   AccumulatedGradients& accumulated) {
  if (spec.is_on_device()) return std::make_unique<DeviceGradientStore>(spec, accumulated);
  return std::make_unique<HostGradientStore>(spec, pool, accumulated);
}

void GradientStore::install_block(const at::Tensor& result, const std::vector<bool>& averaged) {
  accumulated_.keeps_any() ? add_to_kept(result, averaged) : move_to_block(result, averaged);
}

/// The shards of a block that has the result; nothing stood there.
void GradientStore::move_to_block(const at::Tensor& result, const std::vector<bool>& averaged) {
  block_.begin(/*is_overwritten=*/true);
  if (!result.is_same(block_.tensor())) block_.tensor().copy_(result);
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (averaged[i]) accumulated_.kept(i) = block_.shard(i);
  }
  block_.note_shown();
}

/// As autograd does: in place, whoever's tensor it is. Where `.grad` was None the new gradient has
/// memory of its own, since somebody may have kept the one that stood there.
void GradientStore::add_to_kept(const at::Tensor& result, const std::vector<bool>& averaged) {
  std::vector<at::Tensor> kept(spec_.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (averaged[i]) kept[i] = accumulated_.kept(i);
  }
  if (const at::Tensor block = block_.block_of(kept); block.defined()) {
    block.add_(result);
    return;
  }
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (averaged[i]) accumulated_.add_to_kept(spec_.shard_of(result, i), i);
  }
}

}  // namespace libddp
