#include "libddp/activation/frame.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "libddp/activation/checkpoint_error.h"

namespace libddp {
namespace {

/// What autograd gives outside backward passes.
constexpr int kNoTask = -1;

constexpr const char* kDebugHint =
    "Hint: the block must do the same each time it runs; debug=True (or "
    "set_checkpoint_debug_enabled(True)) lists the operators of both runs.";

/// Large for nested tensors and symbolic shapes, which have no plain count.
std::int64_t plain_numel(const at::Tensor& tensor) {
  const bool is_plain =
      !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return is_plain ? tensor.numel() : Frame::kSmallNumel + 1;
}

}  // namespace

Frame::Frame(Settings settings, Name name, Replay replay)
    : settings_(settings), name_(std::move(name)), replay_(std::move(replay)) {
  slots_.reserve(32);
}

void Frame::begin_forward(const std::vector<c10::Device>& devices) {
  autocast_ = AutocastState::now(devices);
  if (settings_.preserve_random) {
    random_ = std::make_unique<RandomState>(RandomState::now(devices));
  }
}

void Frame::end_forward() {
  if (random_ && random_->is_current()) random_.reset();
  forward_is_done_ = true;
}

std::uint32_t Frame::pack(const at::Tensor& tensor) {
  largest_numel_ = std::max(largest_numel_, plain_numel(tensor));
  slots_.push_back({settings_.check_determinism ? TensorKind::of(tensor) : TensorKind()});
  return static_cast<std::uint32_t>(slots_.size() - 1);
}

at::Tensor Frame::unpack(std::uint32_t slot) {
  const int task = torch::autograd::get_current_graph_task_id();
  ReplayPass* pass = task == kNoTask ? nullptr : pass_of(task);
  if (pass != nullptr) return pass->take(slot, name_);
  const std::shared_ptr<Frame> keep = shared_from_this();
  const std::shared_ptr<ReplayPass> fresh = replay(task);
  if (task == kNoTask) std::erase(passes_, fresh);
  return fresh->take(slot, name_);
}

void Frame::release(std::uint32_t slot) {
  slots_[slot].is_alive = false;
  for (const auto& pass : passes_) pass->drop(slot);
}

ReplayPass* Frame::pass_of(int task) {
  const auto found = std::find_if(passes_.begin(), passes_.end(),
                                  [&](const auto& pass) { return pass->task() == task; });
  return found == passes_.end() ? nullptr : found->get();
}

std::shared_ptr<ReplayPass> Frame::replay(int task) {
  std::erase_if(passes_, [](const auto& pass) { return pass->is_used_up(); });
  auto pass = std::make_shared<ReplayPass>(
      task,
      ReplayPass::Limits{.num_slots = slots_.size(),
                         .stop_early = settings_.stop_early.value_or(largest_numel_ > kSmallNumel),
                         .is_complete = forward_is_done_},
      [this](std::size_t slot) { return slots_[slot].is_alive; });
  passes_.push_back(pass);
  try {
    run_replay(pass);
    check(*pass);
  } catch (...) {
    // The next backward pass may try again.
    std::erase(passes_, pass);
    throw;
  }
  return pass;
}

void Frame::run_replay(const std::shared_ptr<ReplayPass>& pass) {
  const at::AutoGradMode grad_mode(true);
  const RandomScope random(random_.get());
  const AutocastScope autocast(autocast_);
  replay_(pass);
}

void Frame::fail(const std::string& message) const {
  if (on_difference_) on_difference_(message);
  throw CheckpointError(message);
}

void Frame::check(const ReplayPass& pass) const {
  if (!pass.is_complete()) return;
  if (pass.num_packed() != slots_.size()) {
    fail(fmt::format(
        "libddp checkpoint of {}: A different number of tensors was saved during the original "
        "forward and recomputation.\nNumber of tensors saved during forward: {}\nNumber of tensors "
        "saved during recomputation: {}\n{}",
        name_(), slots_.size(), pass.num_packed(), kDebugHint));
  }
  if (!settings_.check_determinism) return;
  std::string differences;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot].is_alive || !pass.peek(slot).defined()) continue;
    const TensorKind kind = TensorKind::of(pass.peek(slot));
    if (kind == slots_[slot].kind) continue;
    differences +=
        fmt::format("tensor at position {}:\nsaved metadata: {}\nrecomputed metadata: {}\n", slot,
                    slots_[slot].kind.text(), kind.text());
  }
  if (differences.empty()) return;
  fail(
      fmt::format("libddp checkpoint of {}: Recomputed values for the following tensors have "
                  "different metadata "
                  "than during the forward pass.\n{}{}",
                  name_(), differences, kDebugHint));
}

}  // namespace libddp
