#pragma once

// The memory behind the parameters of a unit: this rank's shards, which the optimizer updates, and
// the whole array, which the computation reads.
//
// Mapped: all ranks are on one host, and the whole array exists once, in memory that all of them
// map. The own shards are parts of it; what the others wrote is there after a barrier. Nothing is
// gathered. With a lower precision for the computation, the array in that precision is what exists
// once, and the own shards are a block apart from it.
// Gathered: the ranks are on several hosts, or the group is not ours. The blocks of all ranks are
// gathered when they are needed, and put together to the whole array in a buffer of the pool, which
// is given back afterwards; tensors that show it, those that autograd saved among them, follow the
// buffer.
// On a device: see device_memory.h; where one rank has everything in the precision of the
// computation, as above.
// Thread rule: one thread at a time; unshard is a collective.
//
//   auto memory = FlatMemory::make({.group = group, .layout = layout, .label = "unit h.0"}, pool);
//   at::Tensor weight = memory->whole(0);
//   memory->shard(0).mul_(2);
//   memory->publish();                                 // shards have changed
//   memory->unshard();

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_layout.h"
#include "libddp/group/process_group.h"

namespace libddp {

class FlatMemory {
 public:
  struct Spec {
    /// Null: this rank has everything.
    Group group = nullptr;
    FlatLayout layout;
    at::ScalarType dtype = at::kFloat;
    at::ScalarType compute_dtype = at::kFloat;
    std::string label{};
    /// Of the computation.
    c10::Device device = c10::kCPU;
    /// Of the own block, where that is elsewhere: see NOTE [Offloading].
    std::optional<at::TensorOptions> home{};
  };

  /// Collective over the group. The contents are undefined.
  static std::unique_ptr<FlatMemory> make(Spec spec, std::shared_ptr<BufferPool> pool);
  virtual ~FlatMemory() = default;
  /// What its collectives are called from now on.
  void relabel(std::string label) { label_ = std::move(label); }

  /// What this rank owns of a parameter, in `dtype`; on the host where it is offloaded.
  virtual at::Tensor shard(std::size_t parameter) const = 0;
  /// The parameter in `compute_dtype`; its bytes are there while it is unsharded.
  virtual at::Tensor whole(std::size_t parameter) const = 0;
  /// All shards of this rank, [block_numel] in `dtype`; undefined where they are parts of the whole
  /// array.
  const at::Tensor& own_block() const { return own_block_; }

  /// After changes of the shards: makes them what the others read.
  virtual void publish() = 0;
  /// Whether the others see what was published only after a barrier.
  virtual bool needs_barrier() const = 0;
  /// Starts to gather; `unshard` waits for it.
  virtual void begin_unshard() {}
  virtual void unshard() {}
  /// Whether the bytes of the whole array are there, or on their way.
  virtual bool is_in_memory() const { return true; }
  /// The current stream has read the whole array.
  virtual void note_use() {}
  /// The bytes of the whole array are not needed for now.
  virtual void reshard() {}
  /// The host may write the own block afterwards.
  virtual void finish_copies() {}

 protected:
  explicit FlatMemory(Spec spec) : spec_(std::move(spec)), label_(spec_.label) {}
  int rank() const { return spec_.group ? spec_.group->rank() : 0; }
  int world_size() const { return spec_.group ? spec_.group->size() : 1; }
  bool computes_low() const { return spec_.compute_dtype != spec_.dtype; }
  void make_own_block(at::Tensor block) { own_block_ = std::move(block); }
  /// Without memory of its own: it has that of a buffer for as long as `point` says so.
  c10::Storage borrowed_storage(std::int64_t numel) const;
  static void point(const c10::Storage& storage, void* memory);
  /// A parameter in such a storage of the whole array.
  at::Tensor whole_in(const c10::Storage& storage, std::size_t parameter) const;
  at::Tensor shard_of_block(const at::Tensor& block, std::size_t parameter) const;

  const std::string& label() const { return label_; }

  const Spec spec_;

 private:
  std::string label_;
  at::Tensor own_block_;
};

}  // namespace libddp
