#pragma once

// Averages the gradients of several small units with one collective.
//
// A collective over a few kilobytes costs as much as one over a hundred: the hand-over to the
// group's thread and the barriers of the ranks, which for tiny parameters is more than everything
// else in a step. So arrays of units that are small are collected and put one behind the other,
// block by block: sums are the same, bit for bit, as the order of the ranks is.
// Thread rule: one thread at a time. `start` is a collective; which units are in it follows from
// the order in which they were added, which must be the same on all ranks.
//
//   SmallReductions small;
//   if (SmallReductions::takes(unit)) small.add(unit);   // its gradients have come
//   if (small.is_full()) small.start(/*async=*/true);
//   small.start(/*async=*/false);                        // the rest, at the end of a pass
//   small.collect();

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_gradient.h"
#include "libddp/fsdp/param_group.h"

namespace libddp {

class SmallReductions {
 public:
  /// Beyond it the two copies cost more than a collective.
  static constexpr std::size_t kMostGroupBytes = 128u << 10;
  /// What waits at most before it is sent on its way beside the backward.
  static constexpr std::size_t kBatchBytes = 512u << 10;

  static bool takes(const ParamGroup& unit);

  void add(ParamGroup& unit);
  bool is_full() const { return waiting_bytes_ >= kBatchBytes; }
  bool is_waiting() const { return !waiting_.empty(); }
  bool is_running() const { return !running_.empty(); }
  /// Averages what waits; `async` false: in this thread.
  void start(bool async);
  /// Waits for what was started; the averages are in their arrays then.
  void collect();
  /// After a failure: waits for what runs and forgets everything.
  void abandon() noexcept;

 private:
  /// Arrays of one group and dtype.
  struct Batch {
    std::vector<FlatGradient*> gradients;
    std::shared_ptr<BufferPool> pool;
    /// Elements of a rank's block, and what travels.
    std::int64_t block_numel = 0;
    at::Tensor sent;
    at::Tensor averages;
    WorkPtr work;
    std::string label;
  };

  Batch& batch_of(const FlatGradient& gradient);
  static std::string label_of(const Batch& batch);
  static void launch(Batch& batch, bool async);
  static void pack(Batch& batch);
  static void unpack(Batch& batch);

  std::vector<FlatGradient*> waiting_;
  std::size_t waiting_bytes_ = 0;
  std::vector<Batch> running_;
  /// So that buffers last from pass to pass.
  std::vector<std::shared_ptr<BufferPool>> pools_;
};

}  // namespace libddp
