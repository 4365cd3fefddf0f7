#pragma once

// The memory of a pass's gradients, from autograd's whole tensors to this rank's part of the
// averages, and the collective between the two. On the host: host_gradient_store.h; on a device:
// device_gradient_store.h. FlatGradient knows which gradients have come and who gets an average.
//
//   add of each --> begin_reduction --> reduce --> collect --> end_reduction --> install
//
// Thread rule: one thread at a time. Collectives: reduce, collect.
//
//   const auto store = GradientStore::make(spec, pool, accumulated);
//   store->add(grad, index);
//   store->begin_reduction({.averaged = averaged});

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/fsdp/accumulated_gradients.h"
#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_spec.h"
#include "libddp/fsdp/gradient_block.h"

namespace libddp {

/// What is averaged.
struct GradientReduction {
  /// Which parameters get an average; zeros stand for gradients that have not come.
  std::vector<bool> averaged;
  /// So that `was_used` can be asked.
  bool notes_used = false;
  /// See FlatGradient::divide_by.
  std::optional<double> divisor{};
};

class GradientStore {
 public:
  /// `spec` and `accumulated` outlive it.
  static std::unique_ptr<GradientStore> make(const FlatSpec& spec,
                                             const std::shared_ptr<BufferPool>& pool,
                                             AccumulatedGradients& accumulated);
  virtual ~GradientStore() = default;
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;

  /// Takes a whole gradient, or adds it to the one that is there.
  virtual void add(const at::Tensor& grad, std::size_t index) = 0;
  /// What the reduction reads and writes is there from now on.
  virtual void begin_reduction(const GradientReduction& reduction) = 0;
  /// The whole gradients as one tensor, the ranks' blocks one behind the other, and the own block
  /// of averages; where nothing is sharded the two are one. For who averages them himself.
  virtual const at::Tensor& whole() = 0;
  virtual const at::Tensor& average() = 0;
  /// Starts to average over the ranks that own blocks, then over the replicas; null: there are no
  /// other ranks.
  virtual WorkPtr reduce(const ReduceOptions& first, const ReduceOptions& second,
                         const std::string& label) = 0;
  /// Waits for it.
  virtual void collect(Work& work, const ReduceOptions& second, const std::string& label) = 0;
  /// The averages are there; whole gradients are not needed any more.
  virtual void end_reduction() = 0;
  /// Whether any rank had a gradient of a parameter.
  virtual bool was_used(std::size_t index) = 0;
  /// Of any parameter; instead of asking for each.
  virtual bool was_any_used() = 0;
  /// Hands out averages: what AccumulatedGradients keeps becomes them, or their sum.
  virtual void install(const std::vector<bool>& averaged) = 0;
  /// They are in `.grad`, which alone has them from now on.
  void release() { block_.release(); }
  /// After a pass that failed: whatever is there is not needed.
  virtual void abandon() = 0;

  /// Whether memory of averaged gradients is there; somebody may have kept one.
  bool has_memory() const { return block_.has_memory(); }

 protected:
  GradientStore(const FlatSpec& spec, AccumulatedGradients& accumulated)
      : spec_(spec), accumulated_(accumulated), block_(spec) {}
  /// For install: of a block that has the averages.
  void install_block(const at::Tensor& result, const std::vector<bool>& averaged);

  const FlatSpec& spec_;
  AccumulatedGradients& accumulated_;
  GradientBlock block_;

 private:
  void move_to_block(const at::Tensor& result, const std::vector<bool>& averaged);
  void add_to_kept(const at::Tensor& result, const std::vector<bool>& averaged);
};

}  // namespace libddp
