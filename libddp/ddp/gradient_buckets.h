#pragma once

// The memory of all gradients: one flat tensor per bucket, allocated where the group communicates
// fastest, and per parameter a tensor that shows its piece.
//
// Behind the gradients a bucket carries a tail of flags in its own dtype, so that they travel in
// the same message:
//   missing      1 where this rank has no gradient for some parameter of the bucket
//   used[k]      1 where this rank has one for member k   (only if `with_usage`)
// After averaging a flag is 0 exactly if it was 0 on all ranks.
// On a device, where the host cannot look at them, buckets have no tail: the flags lie in memory of
// the host and travel in a message of their own (share_flags).
// For a communication hook the gradients lie one behind the other, as in torch's buckets, so that
// what it makes of all of them (a mean, the largest ones) is of nothing else.
// With several owners the gradients of a bucket are padded so that they can be cut into one block
// for each, of whole cache lines.
// Thread rule: immutable after construction, except for the bytes.
//
//   GradientBuckets buckets(*group, parameters, sizes, plan, false);
//   slot.move_to(buckets.view(parameter_index));
//   group->all_reduce(buckets.flat(0), {.op = ReduceOp::Avg});

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libddp/ddp/bucket_plan.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

/// A tensor like `like`, or contiguous where that is not dense, over `flat` from element `offset`
/// on. Its storage shows no more than itself.
at::Tensor piece_of(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like);

/// What `parameters` are now.
std::vector<ParameterSize> sizes_of(const NamedTensors& parameters);

/// Elements [begin, end).
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t numel() const { return end - begin; }
};

class GradientBuckets {
 public:
  /// `sizes`: of the gradients; a parameter itself may have another dtype for a while. A parameter
  /// that the plan leaves out has no bucket: `bucket_of` and `view` are not for it.
  /// `is_packed`: nothing lies between gradients and behind them. REQUIRES: one owner then.
  GradientBuckets(ProcessGroup& group, const NamedTensors& parameters,
                  const std::vector<ParameterSize>& sizes, BucketPlan plan, bool with_usage,
                  int num_owners = 1, bool is_packed = false);

  std::size_t size() const { return plan_.size(); }
  std::size_t num_parameters() const { return views_.size(); }
  const BucketPlan& plan() const { return plan_; }
  const std::vector<std::size_t>& members(std::size_t bucket) const { return plan_[bucket]; }
  std::size_t bucket_of(std::size_t parameter) const { return bucket_of_[parameter]; }
  /// Whether the flags travel with the gradients.
  bool has_tails() const { return !device_ || device_->is_cpu(); }
  /// The whole bucket, tail included: what is communicated.
  const at::Tensor& flat(std::size_t bucket) const { return buckets_[bucket].flat; }
  /// The part of it that holds gradients, and where each member's starts there, in elements.
  at::Tensor gradients(std::size_t bucket) const;
  std::vector<std::size_t> offsets(std::size_t bucket) const;
  /// The part of the gradients that `owner` (0 .. num_owners - 1) has, and its length.
  at::Tensor block(std::size_t bucket, int owner) const;
  std::int64_t block_numel(std::size_t bucket) const;
  /// What `owner` has of a parameter's elements, as they lie in memory.
  ElementRange owned(std::size_t parameter, int owner) const;
  /// Where the parameter's piece starts in its bucket, in elements; and the piece without a shape.
  std::int64_t offset(std::size_t parameter) const { return offset_of_[parameter]; }
  at::Tensor flat_view(std::size_t parameter) const;
  /// "bucket 3 (h.0.attn.weight, ...)", for errors.
  const std::string& label(std::size_t bucket) const { return buckets_[bucket].label; }
  /// The parameter's piece. It has a storage of its own size, so saving it saves nothing else.
  at::Tensor view(std::size_t parameter) const { return views_[parameter]; }

  void set_missing(std::size_t bucket, bool value) { set_flag(bucket, 0, value); }
  bool is_missing(std::size_t bucket) const { return flag(bucket, 0); }
  /// REQUIRES: with_usage. `member` = position in members(bucket).
  void set_used(std::size_t bucket, std::size_t member, bool v) { set_flag(bucket, 1 + member, v); }
  bool is_used(std::size_t bucket, std::size_t member) const { return flag(bucket, 1 + member); }
  /// All flags of all buckets, one byte each, for a message of their own.
  at::Tensor flags() const;
  void set_flags(const at::Tensor& flags);

 private:
  struct Bucket {
    at::Tensor flat;
    std::string label;
    std::int64_t num_gradient_elements = 0;
    /// The flags, in `flat` or in memory of their own.
    std::byte* tail = nullptr;
    std::vector<std::byte> own_tail;
    std::size_t element_bytes = 0;
    std::size_t num_flags = 0;
    /// The bytes of the number 1 in the bucket's dtype.
    std::vector<std::byte> one;
  };

  Bucket build(ProcessGroup& group, const NamedTensors& parameters,
               const std::vector<ParameterSize>& sizes, std::size_t bucket, bool with_usage);
  void set_flag(std::size_t bucket, std::size_t position, bool value);
  bool flag(std::size_t bucket, std::size_t position) const;

  /// What a gradient of so many bytes takes.
  std::size_t slot_bytes(std::size_t bytes) const;
  void place_flags(Bucket& built, std::size_t num_flags);

  BucketPlan plan_;
  const int num_owners_;
  const bool is_packed_;
  /// Of the parameters, where there are any.
  std::optional<c10::Device> device_;
  std::vector<std::size_t> bucket_of_;
  std::vector<std::int64_t> offset_of_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> views_;
};

/// Collective: the flags of all buckets become those of all ranks. Blocks.
void share_flags(ProcessGroup& group, GradientBuckets& buckets);

}  // namespace libddp
