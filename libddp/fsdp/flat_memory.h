#pragma once

// The memory behind the flat array of a unit: this rank's block, which the optimizer updates, and
// the whole array, which the computation reads.
//
// Mapped: all ranks are on one host, and the array exists once, in memory that all of them map. The
// own block is a part of it; what the others wrote is there after a barrier. Nothing is gathered.
// With a lower precision for the computation, the array in that precision is what exists once.
// Gathered: the ranks are on several hosts, or the group is not ours. The array is gathered into a
// buffer of the pool when it is needed and given back afterwards; tensors that show it, those that
// autograd saved among them, follow the buffer.
// Thread rule: one thread at a time; unshard is a collective.
//
//   auto memory = FlatMemory::make({.group = group, .block_numel = 4096, .label = "unit h.0"},
//   pool); at::Tensor weight = memory->view(0, {64, 32});     // of the whole array
//   memory->publish();                                 // own block has changed
//   memory->unshard();

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/buffer_pool.h"
#include "libddp/group/process_group.h"

namespace libddp {

class FlatMemory {
 public:
  struct Spec {
    /// Null: this rank has everything.
    Group group = nullptr;
    std::int64_t block_numel = 0;
    at::ScalarType dtype = at::kFloat;
    at::ScalarType compute_dtype = at::kFloat;
    std::string label{};
  };

  /// Collective over the group. The contents are zeros.
  static std::unique_ptr<FlatMemory> make(Spec spec, std::shared_ptr<BufferPool> pool);
  virtual ~FlatMemory() = default;

  /// [block_numel] in `dtype`.
  const at::Tensor& own_block() const { return own_block_; }
  /// A part of the whole array in `compute_dtype`; its bytes are there while it is unsharded.
  virtual at::Tensor view(std::int64_t offset, at::IntArrayRef sizes) const = 0;

  /// After changes of the own block: makes it what the others read.
  virtual void publish() = 0;
  /// Whether the others see what was published only after a barrier.
  virtual bool needs_meeting() const = 0;
  /// Starts to gather; `unshard` waits for it.
  virtual void begin_unshard() {}
  virtual void unshard() {}
  /// The bytes of the whole array are not needed for now.
  virtual void reshard() {}

 protected:
  explicit FlatMemory(Spec spec) : spec_(std::move(spec)) {}
  int rank() const { return spec_.group ? spec_.group->rank() : 0; }
  int world_size() const { return spec_.group ? spec_.group->size() : 1; }
  bool computes_low() const { return spec_.compute_dtype != spec_.dtype; }

  const Spec spec_;
  at::Tensor own_block_;
};

}  // namespace libddp
