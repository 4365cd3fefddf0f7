#include "libddp/fsdp/flat_parameter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/show_data.h"

namespace libddp {
namespace {

std::vector<FlatLayout::Shape> shapes_of(const NamedTensors& parameters) {
  std::vector<FlatLayout::Shape> shapes;
  for (const auto& [name, tensor] : parameters) shapes.push_back(tensor.sizes().vec());
  return shapes;
}

std::vector<at::Tensor> tensors_of(const NamedTensors& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  return tensors;
}

/// Integers and such have no lower precision.
at::ScalarType compute_dtype_of(at::ScalarType dtype, const ShardOptions& options) {
  return c10::isFloatingType(dtype) ? options.param_dtype.value_or(dtype) : dtype;
}

}  // namespace

FlatParameter::FlatParameter(std::string label, NamedTensors parameters,
                             const ShardOptions& options, std::shared_ptr<BufferPool> pool,
                             const std::function<void(std::size_t)>& on_gradient)
    : label_(std::move(label)),
      call_label_(label_),
      parameters_(std::move(parameters)),
      options_(options),
      pool_(std::move(pool)),
      layout_(shapes_of(parameters_), options.shard ? options.shard->size() : 1),
      dtype_(parameters_.front().tensor.scalar_type()),
      compute_dtype_(compute_dtype_of(dtype_, options)),
      reduce_dtype_(options.reduce_dtype.value_or(compute_dtype_)),
      gradient_dtype_(!options.keep_low_gradients ? dtype_
                      : is_sharded()              ? compute_dtype_
                                                  : reduce_dtype_),
      members_(size()),
      one_(at::ones({1}, reduce_dtype_)) {
  memory_ = FlatMemory::make({options_.shard, layout_, dtype_, compute_dtype_, label_}, pool_);
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < size(); ++i) {
    members_[i].full = memory_->whole(i);
    members_[i].shard = memory_->shard(i);
    take_shard(i);
  }
  // Autograd's nodes remember the shape and dtype that a parameter has when they are made.
  for (std::size_t i = 0; i < size(); ++i) show_data(parameters_[i].tensor, members_[i].full);
  shows_ = Shows::Full;
  if (c10::isFloatingType(dtype_) || c10::isComplexType(dtype_)) {
    late_hooks_ = std::make_unique<LateHooks>(tensors_of(parameters_));
    hooks_ = std::make_unique<AccumulateHooks>(tensors_of(parameters_),
                                               [this, on_gradient](std::size_t index) {
                                                 late_hooks_->put_back(index);
                                                 on_gradient(index);
                                               });
  }
  show_shards();
}

void FlatParameter::set_place(std::uint64_t place, std::string label) {
  place_ = place;
  call_label_ = std::move(label);
  memory_->relabel(call_label_);
}

TrainedSet FlatParameter::trained() const {
  TrainedSet found;
  for (const auto& [name, tensor] : parameters_) found.add(tensor.requires_grad());
  return found;
}

at::Tensor FlatParameter::shard_of(const at::Tensor& block, std::size_t index) const {
  return block.narrow(0, layout_.shard_offset(index), layout_.shard(index, rank()).numel())
      .view(layout_.shard_shape(index, rank()));
}

at::Tensor FlatParameter::shard_in(const at::Tensor& blocks, std::size_t index, int rank) const {
  return blocks.narrow(0, layout_.shard_offset(index, rank), layout_.shard(index, rank).numel());
}

void FlatParameter::take_shard(std::size_t index) {
  const FlatLayout::ShardSpec shard = layout_.shard(index, rank());
  members_[index].shard.reshape(-1).copy_(
      parameters_[index].tensor.detach().reshape(-1).narrow(0, shard.begin, shard.numel()));
}

void FlatParameter::unshard() {
  memory_->unshard();
  if (shows_ == Shows::Full) return;
  check_shards();
  if (is_sharded()) put_gradients_aside();
  for (std::size_t i = 0; i < size(); ++i) show_data(parameters_[i].tensor, members_[i].full);
  // A change of the dtype makes autograd forget the nodes.
  if (hooks_ && compute_dtype_ != dtype_) hooks_->reinstate();
  shows_ = Shows::Full;
}

void FlatParameter::take_written() {
  if (shows_ != Shows::Pieces) return;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& shown = parameters_[i].tensor;
    const at::Tensor& shard = members_[i].shard;
    if (shown.const_data_ptr() == shard.const_data_ptr()) continue;
    if (shown.sizes() != shard.sizes() || shown.scalar_type() != dtype_) continue;
    const c10::NoGradGuard no_grad;
    members_[i].shard.copy_(shown);
    show_data(shown, shard);
  }
}

// What is written elsewhere would be lost without a word.
void FlatParameter::check_shards() const {
  if (shows_ != Shows::Pieces) return;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& shown = parameters_[i].tensor;
    const at::Tensor& shard = members_[i].shard;
    if (shown.const_data_ptr() == shard.const_data_ptr() && shown.sizes() == shard.sizes() &&
        shown.scalar_type() == dtype_) {
      continue;
    }
    const bool moved = shown.sizes() == shard.sizes() && shown.scalar_type() == dtype_;
    const std::string what =
        moved ? "its values were put into other memory between a forward and its backward pass"
              : fmt::format("it is {} [{}], and was {} [{}]", c10::toString(shown.scalar_type()),
                            fmt::join(shown.sizes(), ", "), c10::toString(dtype_),
                            fmt::join(shard.sizes(), ", "));
    throw StateError(fmt::format(
        "libddp {}: parameter '{}' is not what this rank owns of it any more: {}. Hint: change "
        "dtypes and shapes before wrapping, and values between steps: in place (copy_), or through "
        "summon_full_params.",
        label_, parameters_[i].name, what));
  }
}

void FlatParameter::show_shards() {
  if (shows_ != Shows::Full) return;
  for (std::size_t i = 0; i < size(); ++i) show_data(parameters_[i].tensor, members_[i].shard);
  shows_ = Shows::Pieces;
  if (!pass_) give_gradients_back();
}

}  // namespace libddp
