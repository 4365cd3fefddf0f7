#include "libddp/ddp/gradient_buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace libddp {
namespace {

/// Each gradient starts on a cache line: vector kernels of optimizers run without a prologue.
constexpr std::size_t kSlotAlignment = 64;

std::size_t padded_bytes(std::size_t bytes, int num_parts = 1) {
  const std::size_t unit = kSlotAlignment * static_cast<std::size_t>(num_parts);
  return (bytes + unit - 1) / unit * unit;
}

std::string label_of(std::size_t bucket, const std::vector<std::size_t>& members,
                     const NamedTensors& parameters) {
  return fmt::format("bucket {} ({}{})", bucket, parameters[members.front()].name,
                     members.size() > 1 ? ", ..." : "");
}

}  // namespace

// The storage is the piece's own. Strides follow the parameter where autograd's gradients do (its
// gradient layout contract).
at::Tensor piece_of(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const auto options = at::TensorOptions().dtype(flat.scalar_type()).device(flat.device());
  const auto keep_alive = [flat](void*) {};
  auto* const data = static_cast<std::byte*>(flat.data_ptr()) +
                     static_cast<std::size_t>(offset) * flat.element_size();
  if (like.is_non_overlapping_and_dense()) {
    return at::from_blob(data, like.sizes(), like.strides(), keep_alive, options);
  }
  return at::from_blob(data, like.sizes(), keep_alive, options);
}

std::vector<ParameterSize> sizes_of(const NamedTensors& parameters) {
  std::vector<ParameterSize> sizes;
  for (const auto& [name, tensor] : parameters) {
    sizes.push_back({tensor.nbytes(), tensor.scalar_type()});
  }
  return sizes;
}

GradientBuckets::GradientBuckets(ProcessGroup& group, const NamedTensors& parameters,
                                 const std::vector<ParameterSize>& sizes, BucketPlan plan,
                                 bool with_usage, int num_owners, bool is_packed)
    : plan_(std::move(plan)),
      num_owners_(num_owners),
      is_packed_(is_packed),
      bucket_of_(parameters.size()),
      offset_of_(parameters.size()),
      views_(parameters.size()) {
  if (!parameters.empty()) device_ = parameters.front().tensor.device();
  for (std::size_t bucket = 0; bucket < plan_.size(); ++bucket) {
    buckets_.push_back(build(group, parameters, sizes, bucket, with_usage));
  }
}

std::size_t GradientBuckets::slot_bytes(std::size_t bytes) const {
  return is_packed_ ? bytes : padded_bytes(bytes);
}

GradientBuckets::Bucket GradientBuckets::build(ProcessGroup& group, const NamedTensors& parameters,
                                               const std::vector<ParameterSize>& sizes,
                                               std::size_t bucket, bool with_usage) {
  const std::vector<std::size_t>& members = plan_[bucket];
  const at::ScalarType dtype = sizes[members.front()].dtype;
  std::size_t bytes = 0;
  for (const std::size_t index : members) bytes += slot_bytes(sizes[index].bytes);
  if (!is_packed_) bytes = padded_bytes(bytes, num_owners_);
  const std::size_t num_flags = 1 + (with_usage ? members.size() : 0);

  Bucket built;
  built.num_gradient_elements = static_cast<std::int64_t>(bytes / c10::elementSize(dtype));
  const std::int64_t tail_numel = has_tails() ? static_cast<std::int64_t>(num_flags) : 0;
  built.flat = group.allocate({built.num_gradient_elements + tail_numel}, dtype, *device_);
  built.label = label_of(bucket, members, parameters);
  built.element_bytes = built.flat.element_size();
  place_flags(built, num_flags);

  std::size_t next = 0;
  for (const std::size_t index : members) {
    bucket_of_[index] = bucket;
    offset_of_[index] = static_cast<std::int64_t>(next / built.element_bytes);
    views_[index] = piece_of(built.flat, offset_of_[index], parameters[index].tensor);
    next += slot_bytes(sizes[index].bytes);
  }
  return built;
}

void GradientBuckets::place_flags(Bucket& built, std::size_t num_flags) {
  built.num_flags = num_flags;
  if (has_tails()) {
    auto* const data = static_cast<std::byte*>(built.flat.data_ptr());
    std::memset(data, 0, built.flat.nbytes());
    built.tail = data + static_cast<std::size_t>(built.num_gradient_elements) * built.element_bytes;
  } else {
    built.flat.zero_();
    built.own_tail.resize(num_flags * built.element_bytes);
    built.tail = built.own_tail.data();
  }
  const at::Tensor one = at::ones({1}, built.flat.scalar_type());
  const auto* const one_bytes = static_cast<const std::byte*>(one.const_data_ptr());
  built.one.assign(one_bytes, one_bytes + built.element_bytes);
}

at::Tensor GradientBuckets::gradients(std::size_t bucket) const {
  const Bucket& b = buckets_[bucket];
  return b.flat.narrow(0, 0, b.num_gradient_elements);
}

std::vector<std::size_t> GradientBuckets::offsets(std::size_t bucket) const {
  std::vector<std::size_t> offsets;
  for (const std::size_t index : plan_[bucket]) {
    offsets.push_back(static_cast<std::size_t>(offset_of_[index]));
  }
  return offsets;
}

std::int64_t GradientBuckets::block_numel(std::size_t bucket) const {
  return buckets_[bucket].num_gradient_elements / num_owners_;
}

at::Tensor GradientBuckets::block(std::size_t bucket, int owner) const {
  const std::int64_t numel = block_numel(bucket);
  return buckets_[bucket].flat.narrow(0, owner * numel, numel);
}

ElementRange GradientBuckets::owned(std::size_t parameter, int owner) const {
  const std::int64_t numel = block_numel(bucket_of_[parameter]);
  const std::int64_t begin = owner * numel - offset_of_[parameter];
  const std::int64_t all = views_[parameter].numel();
  return {std::clamp<std::int64_t>(begin, 0, all), std::clamp<std::int64_t>(begin + numel, 0, all)};
}

at::Tensor GradientBuckets::flat_view(std::size_t parameter) const {
  return buckets_[bucket_of_[parameter]].flat.narrow(0, offset_of_[parameter],
                                                     views_[parameter].numel());
}

at::Tensor GradientBuckets::flags() const {
  std::size_t num_flags = 0;
  for (const Bucket& bucket : buckets_) num_flags += bucket.num_flags;
  at::Tensor all = at::empty({static_cast<std::int64_t>(num_flags)}, at::kByte);
  auto* next = all.mutable_data_ptr<std::uint8_t>();
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (std::size_t k = 0; k < buckets_[bucket].num_flags; ++k) *next++ = flag(bucket, k);
  }
  return all;
}

void GradientBuckets::set_flags(const at::Tensor& flags) {
  const auto* next = flags.const_data_ptr<std::uint8_t>();
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (std::size_t k = 0; k < buckets_[bucket].num_flags; ++k) {
      set_flag(bucket, k, *next++ != 0);
    }
  }
}

void GradientBuckets::set_flag(std::size_t bucket, std::size_t position, bool value) {
  Bucket& b = buckets_[bucket];
  std::byte* const element = b.tail + position * b.element_bytes;
  if (value) {
    std::memcpy(element, b.one.data(), b.element_bytes);
  } else {
    std::memset(element, 0, b.element_bytes);
  }
}

bool GradientBuckets::flag(std::size_t bucket, std::size_t position) const {
  const Bucket& b = buckets_[bucket];
  const std::byte* const element = b.tail + position * b.element_bytes;
  return std::any_of(element, element + b.element_bytes,
                     [](std::byte byte) { return byte != std::byte{0}; });
}

void share_flags(ProcessGroup& group, GradientBuckets& buckets) {
  if (group.size() == 1 || buckets.size() == 0) return;
  const at::Tensor flags = buckets.flags();
  group.all_reduce(flags, {.op = ReduceOp::Max},
                   {.async = false, .timeout = {}, .label = "flags of the gradients"});
  buckets.set_flags(flags);
}

}  // namespace libddp
