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

std::size_t padded_bytes(std::size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

/// A tensor like `parameter` over `data`, which is part of `flat`. Strides follow the parameter
/// where autograd's gradients do (its gradient layout contract), else they are contiguous.
at::Tensor piece_of(const at::Tensor& flat, void* data, const at::Tensor& parameter) {
  const auto options = at::TensorOptions().dtype(flat.scalar_type()).device(flat.device());
  const auto keep_alive = [flat](void*) {};
  if (parameter.is_non_overlapping_and_dense()) {
    return at::from_blob(data, parameter.sizes(), parameter.strides(), keep_alive, options);
  }
  return at::from_blob(data, parameter.sizes(), keep_alive, options);
}

std::string label_of(std::size_t bucket, const std::vector<std::size_t>& members,
                     const NamedTensors& parameters) {
  return fmt::format("bucket {} ({}{})", bucket, parameters[members.front()].name,
                     members.size() > 1 ? ", ..." : "");
}

}  // namespace

std::vector<ParameterSize> sizes_of(const NamedTensors& parameters) {
  std::vector<ParameterSize> sizes;
  for (const auto& [name, tensor] : parameters) {
    sizes.push_back({tensor.nbytes(), tensor.scalar_type()});
  }
  return sizes;
}

GradientBuckets::GradientBuckets(ProcessGroup& group, const NamedTensors& parameters,
                                 const std::vector<ParameterSize>& sizes, BucketPlan plan,
                                 bool with_usage)
    : plan_(std::move(plan)), bucket_of_(parameters.size()), views_(parameters.size()) {
  for (std::size_t bucket = 0; bucket < plan_.size(); ++bucket) {
    buckets_.push_back(build(group, parameters, sizes, bucket, with_usage));
  }
}

GradientBuckets::Bucket GradientBuckets::build(ProcessGroup& group, const NamedTensors& parameters,
                                               const std::vector<ParameterSize>& sizes,
                                               std::size_t bucket, bool with_usage) {
  const std::vector<std::size_t>& members = plan_[bucket];
  const at::ScalarType dtype = sizes[members.front()].dtype;
  std::size_t bytes = 0;
  for (const std::size_t index : members) bytes += padded_bytes(sizes[index].bytes);
  const std::size_t numel = bytes / c10::elementSize(dtype);
  const std::size_t tail_numel = 1 + (with_usage ? members.size() : 0);

  Bucket built;
  built.flat = group.allocate({static_cast<std::int64_t>(numel + tail_numel)}, dtype);
  built.label = label_of(bucket, members, parameters);
  built.element_bytes = built.flat.element_size();
  built.num_flags = tail_numel;
  auto* const data = static_cast<std::byte*>(built.flat.data_ptr());
  std::memset(data, 0, built.flat.nbytes());
  built.tail = data + bytes;
  const at::Tensor one = at::ones({1}, dtype);
  const auto* const one_bytes = static_cast<const std::byte*>(one.const_data_ptr());
  built.one.assign(one_bytes, one_bytes + built.element_bytes);

  std::byte* next = data;
  for (const std::size_t index : members) {
    bucket_of_[index] = bucket;
    views_[index] = piece_of(built.flat, next, parameters[index].tensor);
    next += padded_bytes(sizes[index].bytes);
  }
  return built;
}

at::Tensor GradientBuckets::gradients(std::size_t bucket) const {
  const Bucket& b = buckets_[bucket];
  return b.flat.narrow(0, 0, b.flat.numel() - static_cast<std::int64_t>(b.num_flags));
}

std::vector<std::size_t> GradientBuckets::offsets(std::size_t bucket) const {
  const auto* const begin = static_cast<const std::byte*>(buckets_[bucket].flat.const_data_ptr());
  std::vector<std::size_t> offsets;
  for (const std::size_t index : plan_[bucket]) {
    const auto* const at = static_cast<const std::byte*>(views_[index].const_data_ptr());
    offsets.push_back(static_cast<std::size_t>(at - begin) / buckets_[bucket].element_bytes);
  }
  return offsets;
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

}  // namespace libddp
