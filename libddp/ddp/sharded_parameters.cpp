#include "libddp/ddp/sharded_parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"
#include "libddp/group/current_stream.h"
#include "libddp/memory/private_view.h"

namespace libddp {
namespace {

/// `tensor` as one dimension, in the order in which elements of `like` lie in memory.
at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like) {
  const bool is_dense = like.is_non_overlapping_and_dense();
  if (!is_dense) return tensor.contiguous().view({-1});
  at::Tensor same = tensor;
  if (tensor.strides() != like.strides()) {
    same = at::empty_strided(like.sizes(), like.strides(), tensor.options());
    same.copy_(tensor);
  }
  return same.as_strided({tensor.numel()}, {1});
}

at::Tensor narrowed(const at::Tensor& flat, const ElementRange& range) {
  return flat.narrow(0, range.begin, range.numel());
}

}  // namespace

ShardedNumbers::ShardedNumbers(const Group& group, std::shared_ptr<const GradientBuckets> buckets,
                               bool complete)
    : group_(group), buckets_(std::move(buckets)), has_all_(complete || group->size() == 1) {
  std::vector<at::Tensor> blocks;
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    const std::int64_t numel = buckets_->block_numel(bucket);
    const at::ScalarType dtype = buckets_->flat(bucket).scalar_type();
    const c10::Device device = buckets_->flat(bucket).device();
    at::Tensor array;
    if (group_->size() > 1 && is_shared_ && device.is_cpu()) {
      array = group_->allocate_shared({numel * group_->size()}, dtype,
                                      {.label = buckets_->label(bucket)});
    }
    is_shared_ = array.defined();
    if (!is_shared_) {
      array = group_->allocate({has_all_ ? numel * group_->size() : numel}, dtype, device);
    }
    const bool is_whole = array.numel() > numel;
    blocks.push_back(is_whole ? array.narrow(0, group_->rank() * numel, numel) : array);
    blocks.back().zero_();
    arrays_.push_back(std::move(array));
  }
  own_.resize(buckets_->num_parameters());
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    const std::int64_t begin = group_->rank() * buckets_->block_numel(bucket);
    for (const std::size_t index : buckets_->members(bucket)) {
      const ElementRange own = buckets_->owned(index, group_->rank());
      const std::int64_t at = own.numel() > 0 ? buckets_->offset(index) + own.begin - begin : 0;
      own_[index] = blocks[bucket].narrow(0, at, own.numel());
    }
  }
}

at::Tensor ShardedNumbers::view(std::size_t parameter) const {
  return piece_of(arrays_[buckets_->bucket_of(parameter)], buckets_->offset(parameter),
                  buckets_->view(parameter));
}

at::Tensor ShardedNumbers::whole(std::size_t parameter) const {
  const c10::NoGradGuard no_grad;
  if (is_shared_ || group_->size() == 1) return view(parameter).clone();
  const at::Tensor like = buckets_->view(parameter);
  at::Tensor flat = at::empty({like.numel()}, like.options());
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group_->size(); ++rank) {
    parts.push_back(narrowed(flat, buckets_->owned(parameter, rank)));
  }
  group_->all_gather(parts, own_[parameter]);
  return flat.as_strided(like.sizes(), like.strides());
}

void ShardedNumbers::load(std::size_t parameter, const at::Tensor& whole) {
  const c10::NoGradGuard no_grad;
  const at::Tensor flat = in_memory_order(whole, buckets_->view(parameter));
  own_[parameter].copy_(narrowed(flat, buckets_->owned(parameter, group_->rank())));
}

void ShardedNumbers::gather() const {
  std::vector<WorkPtr> works;
  for (std::size_t bucket = 0; bucket < arrays_.size(); ++bucket) {
    const std::int64_t numel = buckets_->block_numel(bucket);
    works.push_back(group_->all_gather_into(
        arrays_[bucket], arrays_[bucket].narrow(0, group_->rank() * numel, numel),
        {.async = true, .timeout = {}, .label = buckets_->label(bucket)}));
  }
  for (const WorkPtr& work : works) work->wait();
}

ShardedParameters::ShardedParameters(NamedTensors parameters, Group group,
                                     std::shared_ptr<const GradientBuckets> buckets)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      buckets_(std::move(buckets)),
      values_(group_, buckets_, true) {
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const ElementRange own = buckets_->owned(index, group_->rank());
    own_gradients_.push_back(narrowed(buckets_->flat_view(index), own));
  }
  move_in();
}

void ShardedParameters::move_in() {
  const c10::NoGradGuard no_grad;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    values_.load(index, parameters_[index].tensor.detach());
  }
  publish();
  wait_for_device();
  shown_.resize(parameters_.size());
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) show(bucket);
}

// Showing the arrays frees the memory that the parameters had, into the lists of the streams that
// it was allocated on, which nobody here knows: they may use it only once the copies are done.
void ShardedParameters::wait_for_device() const {
  const c10::Device device = parameters_.front().tensor.device();
  if (device.is_cpu()) return;
  c10::Event done(device.type());
  done.record(current_stream_on(device));
  done.synchronize();
}

void ShardedParameters::show(std::size_t bucket) {
  at::Tensor flat = values_.array(bucket);
  if (values_.is_shared() && flat.numel() > 0) {
    const auto view = PrivateView::of(static_cast<std::byte*>(flat.data_ptr()), flat.nbytes());
    private_.push_back(view);
    // The array stays mapped as long as it is seen.
    flat = at::from_blob(
        view->data(), flat.sizes(), [view, array = flat](void*) {}, flat.options());
  }
  for (const std::size_t index : buckets_->members(bucket)) {
    shown_[index] = piece_of(flat, buckets_->offset(index), buckets_->view(index));
    parameters_[index].tensor.set_data(shown_[index]);
  }
}

at::Tensor ShardedParameters::own_gradient(std::size_t index) const {
  const auto& [name, parameter] = parameters_[index];
  const at::Tensor& grad = parameter.grad();
  const at::Tensor view = buckets_->view(index);
  const bool is_dense = grad.defined() && grad.layout() == at::kStrided;
  if (!is_dense || grad.sizes() != view.sizes() || grad.scalar_type() != view.scalar_type()) {
    throw ArgumentError(fmt::format(
        "libddp: parameter '{}': its gradient does not look like it ({} [{}]). Hint: leave what "
        "the "
        "backward pass has put into .grad there, or change it in place.",
        name, c10::toString(parameter.scalar_type()), fmt::join(parameter.sizes(), ", ")));
  }
  if (grad.const_data_ptr() == view.const_data_ptr()) return own_gradients_[index];
  return narrowed(in_memory_order(grad, view), buckets_->owned(index, group_->rank()));
}

std::vector<std::size_t> ShardedParameters::in_order() const {
  std::vector<std::size_t> order;
  for (const std::vector<std::size_t>& members : buckets_->plan()) {
    order.insert(order.end(), members.begin(), members.end());
  }
  return order;
}

std::shared_ptr<ShardedNumbers> ShardedParameters::make_numbers() const {
  return std::make_shared<ShardedNumbers>(group_, buckets_, false);
}

void ShardedParameters::begin_update() {
  check_in_place();
  if (!values_.is_shared()) return;
  group_->barrier({.async = false, .timeout = {}, .label = "update"});
  take_changes();
}

// See NOTE [Each rank's own changes].
void ShardedParameters::take_changes() {
  for (const std::shared_ptr<PrivateView>& view : private_) {
    const std::size_t block_bytes = view->size_bytes() / static_cast<std::size_t>(group_->size());
    const std::size_t own = block_bytes * static_cast<std::size_t>(group_->rank());
    for (const auto& [first, last] : view->written()) {
      const std::size_t begin = std::max(first, own);
      const std::size_t end = std::min(last, own + block_bytes);
      if (begin < end) std::memcpy(view->shared() + begin, view->data() + begin, end - begin);
    }
  }
}

void ShardedParameters::check_in_place() const {
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const auto& [name, parameter] = parameters_[index];
    if (parameter.const_data_ptr() == shown_[index].const_data_ptr()) continue;
    const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
    throw StateError(fmt::format(
        "{} update: parameter '{}' was given other memory since its optimizer's first step, so the "
        "other ranks do not see it. Hint: change parameters in place (param.copy_, "
        "module.load_state_dict) instead of assigning param.data.",
        me.where(), name));
  }
}

void ShardedParameters::publish() {
  if (values_.is_shared()) {
    group_->barrier({.async = false, .timeout = {}, .label = "updated parameters"});
    for (const std::shared_ptr<PrivateView>& view : private_) view->drop();
  } else if (group_->size() > 1) {
    values_.gather();
  }
  // As an operation in place does: backward through a graph of before is an error.
  for (const auto& [name, parameter] : parameters_) {
    parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace libddp
