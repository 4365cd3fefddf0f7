#include "libddp/fsdp/sharded_model.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

constexpr std::size_t kMostReductions = 1;

/// The ranks that read each other's blocks; null where none does.
Group readers_of(const std::vector<ShardedModel::UnitPtr>& units) {
  Group readers;
  for (const auto& unit : units) {
    if (unit->needs_meeting()) readers = unit->options().shard;
  }
  return readers;
}

/// No backward pass follows that would tell when the others have read what this rank may change
/// now, so the ranks meet once more. `async`: the forward failed, and its error must come out.
void end_reading(const std::vector<ShardedModel::UnitPtr>& units, bool async) {
  if (c10::GradMode::is_enabled()) return;
  if (const Group readers = readers_of(units)) {
    readers->barrier({.async = async, .label = "the end of a sharded forward without gradients"});
  }
}

void end_failed_reading(const std::vector<ShardedModel::UnitPtr>& units) noexcept {
  try {
    end_reading(units, /*async=*/true);
  } catch (const std::exception&) {
    // The group has failed: the next collective says so.
  }
}

}  // namespace

std::shared_ptr<ShardedModel> ShardedModel::create(std::vector<UnitPtr> units,
                                                   ShardedModelOptions options) {
  std::shared_ptr<ShardedModel> model(new ShardedModel(std::move(units), std::move(options)));
  for (const UnitPtr& unit : model->units_) {
    unit->on_gradient([weak = std::weak_ptr(model)](Unit& of) {
      if (const auto self = weak.lock()) self->on_gradient(of);
    });
  }
  return model;
}

ShardedModel::ShardedModel(std::vector<UnitPtr> units, ShardedModelOptions options)
    : units_(std::move(units)), options_(std::move(options)) {}

ShardedModel::~ShardedModel() {
  for (const UnitPtr& unit : units_) unit->on_gradient(nullptr);
}

template <typename Function>
void ShardedModel::guarded(Function&& function) {
  try {
    function();
  } catch (...) {
    if (options_.rethrow) options_.rethrow(std::current_exception());
    throw;
  }
}

void ShardedModel::before_forward(Unit& unit) {
  // Inside a backward pass it is a recomputation, which reads what the first computation read.
  if (depth_ == 0 && !(is_in_pass_ && is_nested_backward())) begin_step();
  record(unit);
  try {
    unit.show_full();
  } catch (...) {
    if (depth_ == 0 && !is_in_pass_) end_failed_reading(units_);
    throw;
  }
  if (options_.forward_prefetch && !is_in_pass_) prefetch(unit, 1);
  ++depth_;  // last: what throws has not begun
}

void ShardedModel::after_forward(Unit& unit, const std::vector<at::Tensor>& outputs) {
  --depth_;
  const bool is_root = &unit == units_.front().get();
  bool will_be_back = false;
  if (c10::GradMode::is_enabled()) {
    auto leaves =
        call_before_any_backward(outputs, [weak = weak_from_this(), &unit](bool accumulates) {
          const auto self = weak.lock();
          if (self) self->guarded([&] { self->before_backward(unit, accumulates); });
        });
    if (leaves) output_leaves_.push_back(std::move(leaves));
    will_be_back = std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
      return output.defined() && output.requires_grad();
    });
  }
  if (!unit.hides_gradients()) {  // else its backward follows at once
    const bool stays = will_be_back && (is_root || unit.options().keep_unsharded);
    unit.show_pieces(/*reshard=*/!stays);
  }
  if (depth_ == 0 && !is_in_pass_) end_reading(units_, /*async=*/false);
}

void ShardedModel::forward_failed(Unit& unit) {
  --depth_;
  if (!unit.hides_gradients()) unit.show_pieces(/*reshard=*/true);
  if (depth_ == 0 && !is_in_pass_) end_failed_reading(units_);
}

void ShardedModel::begin_step() {
  recover();
  output_leaves_.clear();
  for (const UnitPtr& unit : units_) unit->release_gradients();
  publish();
}

// What an exception in the last step has left behind.
void ShardedModel::recover() {
  reducing_.clear();
  small_.abandon();
  is_in_pass_ = false;
  pass_ = nullptr;
  for (const UnitPtr& unit : units_) {
    if (unit->hides_gradients()) unit->abandon();
    unit->show_pieces(/*reshard=*/true);
  }
}

void ShardedModel::publish() {
  for (const UnitPtr& unit : units_) unit->publish();
  const Group readers = readers_of(units_);
  if (readers) readers->barrier({.label = "the beginning of a sharded forward"});
}

void ShardedModel::record(Unit& unit) {
  if (std::find(order_.begin(), order_.end(), &unit) == order_.end()) order_.push_back(&unit);
}

void ShardedModel::prefetch(const Unit& unit, int step) {
  const auto here = std::find(order_.begin(), order_.end(), &unit) - order_.begin();
  const auto next = here + step;
  // The root comes first in the order and stays.
  if (next < 1 || next >= static_cast<std::ptrdiff_t>(order_.size())) return;
  order_[static_cast<std::size_t>(next)]->begin_unshard();
}

void ShardedModel::before_backward(Unit& unit, bool accumulates) {
  if (!is_in_pass_) begin_pass();
  if (accumulates) {
    accumulates_ = true;
    unit.hide_gradients();
  }
  unit.show_full();
  if (options_.backward_prefetch) prefetch(unit, -1);
}

void ShardedModel::begin_pass() {
  is_in_pass_ = true;
  accumulates_ = false;
  pass_syncs_ = syncs_;
  for (const UnitPtr& unit : units_) unit->release_gradients();
  const auto pass = std::make_shared<Pass>(weak_from_this());
  pass_ = pass.get();
  call_after_backward([pass] {
    const auto self = pass->model.lock();
    if (self) self->guarded([&] { self->end_pass(); });
  });
}

// Autograd drops the callback of a pass that fails. Where averages are under way, the next forward
// waits for them: the error must come out now.
ShardedModel::Pass::~Pass() {
  const auto self = model.lock();
  if (!self || self->pass_ != this || self->depth_ > 0) return;
  if (!self->reducing_.empty() || self->small_.is_running()) return;
  try {
    self->recover();
  } catch (const Error&) {
    // The next forward says what is wrong.
  }
}

void ShardedModel::on_gradient(Unit& unit) {
  if (!unit.is_complete()) return;
  guarded([&] { complete(unit); });
}

void ShardedModel::complete(Unit& unit) {
  if (pass_syncs_ && !unit.is_reducing()) reduce(unit);
  unit.show_pieces(/*reshard=*/true);
}

void ShardedModel::reduce(Unit& unit) {
  if (SmallReductions::takes(unit)) {
    small_.add(unit);
    if (small_.is_full()) small_.start(/*async=*/true);
    return;
  }
  collect_oldest(kMostReductions - 1);
  unit.reduce();
  reducing_.push_back(&unit);
}

void ShardedModel::collect_oldest(std::size_t most) {
  while (reducing_.size() > most) {
    Unit* const oldest = reducing_.front();
    reducing_.pop_front();
    oldest->collect();
  }
}

void ShardedModel::end_pass() {
  pass_ = nullptr;
  if (accumulates_ && pass_syncs_) reduce_rest();
  small_.start(/*async=*/false);
  collect_oldest(0);
  small_.collect();
  for (const UnitPtr& unit : units_) {
    unit->show_pieces(/*reshard=*/true);
    if (unit->hides_gradients()) unit->install();
  }
  is_in_pass_ = false;
}

// Units of which some parameter got no gradient, and those that passes without synchronisation have
// left something in. Backwards, as passes go; the same on every rank.
void ShardedModel::reduce_rest() {
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->is_reducing()) continue;
    if (!(*unit)->hides_gradients() && !(*unit)->has_gradients()) continue;
    (*unit)->hide_gradients();
    complete(**unit);
  }
}

void ShardedModel::show_copies(const std::vector<UnitPtr>& units,
                               const FlatParameter::CopyOptions& options) {
  if (depth_ > 0 || is_in_pass_) {
    throw StateError(
        "libddp fsdp: parameters cannot be summoned inside a forward or backward pass. Hint: call "
        "summon_full_params between steps.");
  }
  begin_step();
  for (const UnitPtr& unit : units) {
    for (const auto& flat : unit->flats()) {
      flat->show_copies(options);
      flat->memory().reshard();
    }
  }
  // Nobody changes what others still copy.
  for (const UnitPtr& unit : units) {
    if (!unit->needs_meeting()) continue;
    unit->options().shard->barrier({.label = "full parameters are copied"});
    break;
  }
}

void ShardedModel::end_copies(const std::vector<UnitPtr>& units, bool keep) {
  std::exception_ptr problem;
  for (const UnitPtr& unit : units) {
    for (const auto& flat : unit->flats()) {
      try {
        flat->end_copies(keep);
      } catch (const StateError&) {
        if (!problem) problem = std::current_exception();
      }
    }
  }
  if (problem) std::rethrow_exception(problem);
}

}  // namespace libddp
