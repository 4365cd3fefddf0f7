#include "libddp/activation/checkpoint_frame.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "libddp/activation/checkpoint_error.h"
#include "libddp/autograd/version_of.h"

namespace libddp {
namespace {

/// What autograd gives outside backward passes.
constexpr int kNoTask = -1;

/// Texts by which scripts know torch's errors.
constexpr const char* kMore =
    "torch.utils.checkpoint: trying to save more tensors during recomputation than during the "
    "original forward pass";
constexpr const char* kFewer =
    "A different number of tensors was saved during the original forward and recomputation";

constexpr const char* kDebugHint =
    "Hint: the block must do the same each time it runs; debug=True (or "
    "set_checkpoint_debug_enabled(True)) lists the operators of both runs.";

/// Large for nested tensors and symbolic shapes, which have no plain count.
std::int64_t plain_numel(const at::Tensor& tensor) {
  const bool is_plain =
      !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return is_plain ? tensor.numel() : CheckpointFrame::kSmallNumel + 1;
}

}  // namespace

CheckpointFrame::CheckpointFrame(Settings settings, Caller caller)
    : settings_(settings), caller_(std::move(caller)) {
  slots_.reserve(32);
}

void CheckpointFrame::begin_forward(const std::vector<c10::Device>& devices) {
  autocast_ = AutocastState::now(devices);
  if (settings_.preserve_random) {
    random_ = std::make_unique<RandomState>(RandomState::now(devices));
  }
}

void CheckpointFrame::end_forward() {
  if (random_ && random_->is_current()) random_.reset();
  const std::lock_guard lock(mutex_);
  forward_is_done_ = true;
}

std::uint32_t CheckpointFrame::pack(const at::Tensor& tensor) {
  Slot slot{settings_.check_determinism ? TensorKind::of(tensor) : TensorKind()};
  const std::int64_t numel = plain_numel(tensor);
  const std::lock_guard lock(mutex_);
  largest_numel_ = std::max(largest_numel_, numel);
  slots_.push_back(std::move(slot));
  return static_cast<std::uint32_t>(slots_.size() - 1);
}

at::Tensor CheckpointFrame::pack_replay(ReplayPass& pass, const at::Tensor& tensor) {
  // Without history, so that no circle of references arises; and a tensor of its own, as a frozen
  // parameter of a sharded model shows other values once the block has run again.
  at::Tensor plain = tensor.tensor_data();
  bool is_stopped = false;
  {
    const std::lock_guard lock(mutex_);
    pass.pack(plain);
    is_stopped = pass.is_stopped();
  }
  if (is_stopped) caller_.stop();
  return plain;
}

at::Tensor CheckpointFrame::unpack(std::uint32_t slot) {
  const std::shared_ptr<CheckpointFrame> keep = shared_from_this();
  const int task = torch::autograd::get_current_graph_task_id();
  const auto [pass, is_new] = pass_of(task);
  if (is_new) replay(pass);
  ReplayPass::Taken taken;
  {
    const std::lock_guard lock(mutex_);
    taken = pass->take(slot);
  }
  if (task == kNoTask) end(pass, /*forget=*/true);
  return checked(std::move(taken), slot);
}

at::Tensor CheckpointFrame::checked(ReplayPass::Taken taken, std::uint32_t slot) const {
  if (!taken.tensor.defined()) {
    fail(fmt::format(
        "libddp checkpoint of {}: Unpack is being triggered for a tensor that was already unpacked "
        "once (saved tensor {}). Hint: read ctx.saved_tensors once per backward.",
        caller_.name(), slot));
  }
  if (version_of(taken.tensor) != taken.version) {
    fail(fmt::format(
        "libddp checkpoint of {}: saved tensor {} has been modified by an inplace operation after "
        "it was saved: it is at version {}; expected version {}. Hint: the block computes a "
        "gradient from a tensor that it changes afterwards; clone the tensor first.",
        caller_.name(), slot, version_of(taken.tensor), taken.version));
  }
  return std::move(taken.tensor);
}

void CheckpointFrame::release(std::uint32_t slot) {
  // They go after the lock: a tensor's end may run code of others.
  c10::SmallVector<ReplayPass::Taken, 2> dropped;
  const std::lock_guard lock(mutex_);
  slots_[slot].is_alive = false;
  for (const auto& pass : passes_) dropped.push_back(pass->take(slot));
}

CheckpointFrame::Passes::iterator CheckpointFrame::find(int task) {
  return std::find_if(passes_.begin(), passes_.end(),
                      [&](const auto& pass) { return pass->task() == task; });
}

std::pair<std::shared_ptr<ReplayPass>, bool> CheckpointFrame::pass_of(int task) {
  std::unique_lock lock(mutex_);
  if (task != kNoTask) {
    wait(lock, task);
    const auto found = find(task);
    if (found != passes_.end()) return {*found, false};
  }
  return {make_pass(task), true};
}

void CheckpointFrame::wait(std::unique_lock<std::mutex>& lock, int task) {
  const auto is_run_by_another = [&] {
    const auto found = find(task);
    return found != passes_.end() && (*found)->is_run_by_another();
  };
  if (!is_run_by_another()) return;
  lock.unlock();
  const auto wait = [&] {
    lock.lock();
    pass_has_ended_.wait(lock, [&] { return !is_run_by_another(); });
    lock.unlock();
  };
  if (caller_.wait_unlocked) {
    caller_.wait_unlocked(wait);
  } else {
    wait();
  }
  lock.lock();
}

std::shared_ptr<ReplayPass> CheckpointFrame::make_pass(int task) {
  std::erase_if(passes_,
                [](const auto& pass) { return pass->is_used_up() && !pass->is_running(); });
  auto pass = std::make_shared<ReplayPass>(
      task,
      ReplayPass::Limits{.num_slots = slots_.size(),
                         .stop_early = settings_.stop_early.value_or(largest_numel_ > kSmallNumel),
                         .is_complete = forward_is_done_},
      [this](std::size_t slot) { return slots_[slot].is_alive; });
  passes_.push_back(pass);
  return pass;
}

void CheckpointFrame::replay(const std::shared_ptr<ReplayPass>& pass) {
  try {
    {
      const at::AutoGradMode grad_mode(true);
      const RandomScope random(random_.get());
      const AutocastScope autocast(autocast_);
      caller_.replay(pass);
    }
    check(*pass);
  } catch (...) {
    // The next backward pass may try again.
    end(pass, /*forget=*/true);
    throw;
  }
  end(pass, /*forget=*/false);
}

void CheckpointFrame::end(const std::shared_ptr<ReplayPass>& pass, bool forget) {
  {
    const std::lock_guard lock(mutex_);
    pass->end_run();
    if (forget) std::erase(passes_, pass);
  }
  pass_has_ended_.notify_all();
}

void CheckpointFrame::fail(const std::string& message) const {
  if (caller_.fail) caller_.fail(message);
  throw CheckpointError(message);
}

std::string CheckpointFrame::differences(const ReplayPass& pass) const {
  std::string differences;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot].is_alive || !pass.peek(slot).defined()) continue;
    const TensorKind kind = TensorKind::of(pass.peek(slot));
    if (kind == slots_[slot].kind) continue;
    differences +=
        fmt::format("tensor at position {}:\nsaved metadata: {}\nrecomputed metadata: {}\n", slot,
                    slots_[slot].kind.text(), kind.text());
  }
  return differences;
}

void CheckpointFrame::check(const ReplayPass& pass) {
  if (!pass.is_complete()) return;
  std::unique_lock lock(mutex_);
  const std::size_t num_slots = slots_.size();
  const std::string found = settings_.check_determinism ? differences(pass) : "";
  lock.unlock();
  if (pass.num_packed() != num_slots) {
    fail(
        fmt::format("libddp checkpoint of {}: {}.\nNumber of tensors saved during forward: {}\n"
                    "Number of tensors saved during recomputation: {}\n{}",
                    caller_.name(), pass.num_packed() > num_slots ? kMore : kFewer, num_slots,
                    pass.num_packed(), kDebugHint));
  }
  if (found.empty()) return;
  fail(fmt::format(
      "libddp checkpoint of {}: Recomputed values for the following tensors have different "
      "metadata than during the forward pass.\n{}{}",
      caller_.name(), found, kDebugHint));
}

}  // namespace libddp
