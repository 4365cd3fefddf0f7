#pragma once

// GradientStore on the host: gradients are copied into an array of the pool, or into the own block
// where that is the same. Thread rule: as GradientStore.
//
//   HostGradientStore gradients(spec, pool, accumulated);

#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/gradient_array.h"
#include "libddp/fsdp/gradient_store.h"

namespace libddp {

class HostGradientStore final : public GradientStore {
 public:
  HostGradientStore(const FlatSpec& spec, const std::shared_ptr<BufferPool>& pool,
                    AccumulatedGradients& accumulated)
      : GradientStore(spec, accumulated), array_(spec, pool) {}

  void add(const at::Tensor& grad, std::size_t index) override;
  void begin_reduction(const GradientReduction& reduction) override;
  const at::Tensor& whole() override { return array_.tensor(); }
  const at::Tensor& average() override { return average_; }
  WorkPtr reduce(const ReduceOptions& first, const ReduceOptions& second,
                 const std::string& label) override;
  void collect(Work& work, const ReduceOptions& second, const std::string& label) override;
  void end_reduction() override;
  bool was_used(std::size_t index) override { return array_.take_note(average_, index); }
  bool was_any_used() override;
  void install(const std::vector<bool>& averaged) override;
  void abandon() override;

 private:
  void begin_array();

  /// Where nothing is sharded, the block itself if nothing stands there.
  GradientArray array_;
  /// What the reduction writes.
  at::Tensor average_;
};

}  // namespace libddp
