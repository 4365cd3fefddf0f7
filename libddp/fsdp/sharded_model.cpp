#include "libddp/fsdp/sharded_model.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

constexpr std::size_t kMostReductions = 1;

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
  unit.show_full();
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
  if (unit.hides_gradients()) return;  // its backward follows at once
  const bool stays = will_be_back && (is_root || unit.options().keep_unsharded);
  unit.show_pieces(/*reshard=*/!stays);
}

void ShardedModel::forward_failed(Unit& unit) {
  --depth_;
  if (!unit.hides_gradients()) unit.show_pieces(/*reshard=*/true);
}

void ShardedModel::begin_step() {
  recover();
  output_leaves_.clear();
  publish();
}

// What an exception in the last step has left behind.
void ShardedModel::recover() {
  reducing_.clear();
  is_in_pass_ = false;
  pass_ = nullptr;
  for (const UnitPtr& unit : units_) {
    if (unit->hides_gradients()) unit->abandon();
    unit->show_pieces(/*reshard=*/true);
  }
}

void ShardedModel::publish() {
  Group meets;
  for (const UnitPtr& unit : units_) {
    unit->publish();
    if (unit->needs_meeting()) meets = unit->options().shard;
  }
  if (meets) meets->barrier({.label = "the beginning of a sharded forward"});
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
  if (!self || self->pass_ != this || self->depth_ > 0 || !self->reducing_.empty()) return;
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
  if (pass_syncs_ && !unit.is_reducing()) {
    collect_oldest(kMostReductions - 1);
    unit.reduce();
    reducing_.push_back(&unit);
  }
  unit.show_pieces(/*reshard=*/true);
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
  collect_oldest(0);
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
