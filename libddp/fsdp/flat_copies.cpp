// Copies of the whole tensors of a FlatParameter, for who reads or writes the model between steps.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/show_data.h"

namespace libddp {

void FlatParameter::show_copies(const CopyOptions& options) {
  if (shows_ == Shows::Copies) return;
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> whole = whole_parameters();
  std::vector<at::Tensor> gradients;
  const bool may_have_any = late_hooks_ != nullptr;  // alike on all ranks, whatever they have
  if (options.with_gradients && may_have_any) gradients = whole_gradients();
  if (!options.here) return;
  for (std::size_t i = 0; i < size(); ++i) parameters_[i].tensor.set_data(whole[i]);
  shows_ = Shows::Copies;
  if (gradients.empty()) return;
  put_gradients_aside();
  for (std::size_t i = 0; i < size(); ++i) parameters_[i].tensor.mutable_grad() = gradients[i];
}

std::vector<at::Tensor> FlatParameter::whole_parameters() {
  std::vector<at::Tensor> whole;
  if (compute_dtype_ == dtype_) {
    memory_->unshard();
    for (const Member& member : members_) whole.push_back(member.full.clone());
    return whole;
  }
  // What the computation reads has lost digits.
  const at::Tensor all = gather(memory_->own_block());
  for (std::size_t i = 0; i < size(); ++i) whole.push_back(put_together(all, i));
  return whole;
}

/// All ranks take part, also where some have no gradients.
std::vector<at::Tensor> FlatParameter::whole_gradients() const {
  const at::Tensor block = at::zeros({layout_.block_numel()}, gradient_dtype_);
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& grad = parameters_[i].tensor.grad();
    if (grad.defined()) shard_of(block, i).copy_(grad);
  }
  const at::Tensor all = gather(block);
  std::vector<at::Tensor> whole(size());
  for (std::size_t i = 0; i < size(); ++i) {
    if (parameters_[i].tensor.grad().defined()) whole[i] = put_together(all, i);
  }
  return whole;
}

at::Tensor FlatParameter::gather(const at::Tensor& block) const {
  if (!is_sharded()) return block;
  at::Tensor blocks = at::empty({layout_.blocks_numel()}, block.options());
  options_.shard->all_gather_into(blocks, block, {.label = call_label_});
  return blocks;
}

/// The tensor of one parameter out of the blocks of all ranks.
at::Tensor FlatParameter::put_together(const at::Tensor& blocks, std::size_t index) const {
  at::Tensor whole = at::empty(layout_.shape(index), blocks.options());
  const at::Tensor elements = whole.view(-1);
  for (int rank = 0; rank < layout_.world_size(); ++rank) {
    const FlatLayout::ShardSpec shard = layout_.shard(index, rank);
    elements.narrow(0, shard.begin, shard.numel()).copy_(shard_in(blocks, index, rank));
  }
  return whole;
}

void FlatParameter::end_copies(bool keep) {
  if (shows_ != Shows::Copies) return;
  const c10::NoGradGuard no_grad;
  const std::string problem = keep ? wrong_copy() : "";
  keep = keep && problem.empty();
  for (std::size_t i = 0; i < size(); ++i) {
    if (keep) take_shard(i);
    show_data(parameters_[i].tensor, members_[i].shard);
    if (gradients_are_aside_) end_gradient_copy(i, keep);
  }
  gradients_are_aside_ = false;
  shows_ = Shows::Pieces;
  if (!problem.empty()) throw StateError(problem);
}

void FlatParameter::end_gradient_copy(std::size_t index, bool keep) {
  at::Tensor& grad = parameters_[index].tensor.mutable_grad();
  Member& member = members_[index];
  const bool waits = member.waiting.defined();
  at::Tensor kept = std::exchange(waits ? member.waiting : member.aside, at::Tensor());
  if (keep && grad.defined()) {
    const FlatLayout::ShardSpec shard = layout_.shard(index, rank());
    const at::Tensor changed = grad.reshape(-1).narrow(0, shard.begin, shard.numel());
    const at::Tensor shaped = changed.view(layout_.shard_shape(index, rank()));
    kept = kept.defined() ? kept.copy_(shaped) : shaped.clone();
  }
  const bool was_cleared = keep && !grad.defined();
  grad = was_cleared ? at::Tensor() : std::move(kept);
  member.shows_waiting = waits;
}

/// What is said where somebody has put a tensor of another shape there; empty if nobody has.
std::string FlatParameter::wrong_copy() const {
  for (std::size_t i = 0; i < size(); ++i) {
    const auto& [name, tensor] = parameters_[i];
    const at::Tensor& grad = tensor.grad();
    const bool checks_grad = gradients_are_aside_ && grad.defined();
    const bool is_grad = checks_grad && grad.sizes() != at::IntArrayRef(layout_.shape(i));
    if (!is_grad && tensor.sizes() == at::IntArrayRef(layout_.shape(i))) continue;
    return fmt::format(
        "libddp {}: the whole {}parameter '{}' was given the shape [{}], and is [{}]; nothing of "
        "this unit is kept. Hint: write values in place (copy_), of the same shape.",
        label_, is_grad ? "gradient of " : "", name,
        fmt::join(is_grad ? grad.sizes() : tensor.sizes(), ", "),
        fmt::join(layout_.shape(i), ", "));
  }
  return {};
}

}  // namespace libddp
