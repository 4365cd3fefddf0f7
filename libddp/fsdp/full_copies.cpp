#include "libddp/fsdp/full_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "libddp/base/error.h"
#include "libddp/fsdp/show_data.h"

namespace libddp {

void FullCopies::check(const CopyOptions& options) const {
  if (!options.with_gradients || !accumulated_.shows_larger_gradients()) return;
  throw StateError(fmt::format(
      "libddp {}: gradients of passes under no_sync wait to be averaged, so this rank has none of "
      "the whole averages. Hint: run a backward pass that synchronises before, or zero_grad().",
      spec_.label));
}

void FullCopies::show(const CopyOptions& options) {
  if (are_shown_) return;
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> whole = whole_parameters();
  std::vector<at::Tensor> gradients;
  if (options.with_gradients && spec_.can_require_grad()) gradients = whole_gradients();
  if (!options.here) return;
  for (std::size_t i = 0; i < spec_.size(); ++i) show_data(spec_.parameters[i].tensor, whole[i]);
  are_shown_ = true;
  if (gradients.empty()) return;
  accumulated_.put_aside();
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    spec_.parameters[i].tensor.mutable_grad() = gradients[i];
  }
}

std::vector<at::Tensor> FullCopies::whole_parameters() {
  std::vector<at::Tensor> whole;
  if (spec_.compute_dtype == spec_.dtype) {
    memory_.unshard();
    for (std::size_t i = 0; i < spec_.size(); ++i) whole.push_back(memory_.whole(i).clone());
    return whole;
  }
  // What the computation reads has lost digits.
  const at::Tensor all = gather(memory_.own_block().to(spec_.device));
  for (std::size_t i = 0; i < spec_.size(); ++i) whole.push_back(put_together(all, i));
  return whole;
}

std::vector<at::Tensor> FullCopies::whole_gradients() const {
  const at::Tensor block =
      at::zeros({spec_.layout.block_numel()}, spec_.tensor_options(spec_.gradient_dtype));
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    const at::Tensor& grad = spec_.parameters[i].tensor.grad();
    if (grad.defined()) spec_.shard_of(block, i).copy_(grad);
  }
  const at::Tensor all = gather(block);
  std::vector<at::Tensor> whole(spec_.size());
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (spec_.parameters[i].tensor.grad().defined()) whole[i] = put_together(all, i);
  }
  return whole;
}

at::Tensor FullCopies::gather(const at::Tensor& block) const {
  if (!spec_.is_sharded()) return block;
  at::Tensor blocks = at::empty({spec_.layout.blocks_numel()}, block.options());
  spec_.options.shard->all_gather_into(blocks, block, {.label = spec_.call_label});
  return blocks;
}

/// The tensor of one parameter out of the blocks of all ranks.
at::Tensor FullCopies::put_together(const at::Tensor& blocks, std::size_t index) const {
  at::Tensor whole = at::empty(spec_.layout.shape(index), blocks.options());
  const at::Tensor elements = whole.view(-1);
  for (int rank = 0; rank < spec_.layout.world_size(); ++rank) {
    const FlatLayout::ShardSpec shard = spec_.layout.shard(index, rank);
    elements.narrow(0, shard.begin, shard.numel()).copy_(spec_.shard_in(blocks, index, rank));
  }
  return whole;
}

void FullCopies::end(bool keep) {
  if (!are_shown_) return;
  const c10::NoGradGuard no_grad;
  const std::string problem = keep ? wrong_copy() : "";
  keep = keep && problem.empty();
  memory_.finish_copies();  // the script may write what the copies were made of
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    const at::Tensor& shown = spec_.parameters[i].tensor;
    const at::Tensor shard = memory_.shard(i);
    if (keep) shard.reshape(-1).copy_(spec_.shard_in_whole(shown.detach(), i));
    show_data(shown, shard);
    if (accumulated_.is_aside()) accumulated_.end_copy(i, keep);
  }
  accumulated_.forget_aside();
  are_shown_ = false;
  if (!problem.empty()) throw StateError(problem);
}

/// What is said where somebody has put a tensor of another shape there; empty if nobody has.
std::string FullCopies::wrong_copy() const {
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    const auto& [name, tensor] = spec_.parameters[i];
    const at::IntArrayRef shape(spec_.layout.shape(i));
    const at::Tensor& grad = tensor.grad();
    const bool is_grad = accumulated_.is_aside() && grad.defined() && grad.sizes() != shape;
    if (!is_grad && tensor.sizes() == shape) continue;
    return fmt::format(
        "libddp {}: the whole {}parameter '{}' was given the shape [{}], and is [{}]; nothing of "
        "this unit is kept. Hint: write values in place (copy_), of the same shape.",
        spec_.label, is_grad ? "gradient of " : "", name,
        fmt::join(is_grad ? grad.sizes() : tensor.sizes(), ", "), fmt::join(shape, ", "));
  }
  return {};
}

}  // namespace libddp
