#include "libddp/fsdp/sharded_model.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string>
#include <tuple>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/autograd/graph_task.h"
#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/fsdp/device_calls.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/reading_groups.h"
#include "libddp/fsdp/small_reductions.h"
#include "libddp/fsdp/units_on_devices.h"

namespace libddp {
namespace {

constexpr std::size_t kMostReductions = 1;
constexpr const char* kEndOfForward = "the end of a sharded forward";

/// Where a backward pass may begin.
bool is_any_on_cpu(const std::vector<at::Tensor>& outputs) {
  return std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
    return output.defined() && output.requires_grad() && output.device().is_cpu();
  });
}

/// What this rank changes from now on, nobody reads any more. See NOTE [Barriers].
void end_reading(const std::vector<ShardedModel::ParamGroupPtr>& units, const char* label) {
  meet_readers(units, {.label = label});
}

/// After a forward that failed, whose error must come out. Where it had gradients, the others are
/// told of it by whoever caught it.
void end_failed_reading(const std::vector<ShardedModel::ParamGroupPtr>& units) noexcept {
  if (c10::GradMode::is_enabled()) return;
  try {
    meet_readers(units, {.async = true, .label = kEndOfForward});
  } catch (const std::exception&) {
    // The group has failed: the next collective says so.
  }
}

}  // namespace

std::shared_ptr<ShardedModel> ShardedModel::create(std::vector<ParamGroupPtr> units,
                                                   ShardedModelOptions options) {
  std::shared_ptr<ShardedModel> model(new ShardedModel(std::move(units), std::move(options)));
  std::size_t place = 0;
  for (const ParamGroupPtr& unit : model->units_) {
    unit->set_place(place++);
    if (model->options_.rethrow) unit->on_error(model->options_.rethrow);
    unit->on_gradient(
        [weak = std::weak_ptr(model)](ParamGroup& of, std::size_t flat, std::size_t index) {
          const auto self = weak.lock();
          if (!self) return of.accumulate(flat, index);
          const auto lock = self->lock_hooks();
          self->take_gradient(of, flat, index);
        });
  }
  return model;
}

ShardedModel::ShardedModel(std::vector<ParamGroupPtr> units, ShardedModelOptions options)
    : units_(std::move(units)),
      options_(std::move(options)),
      device_ranks_(device_ranks_of(units_)),
      calls_(std::make_unique<DeviceCalls>(device_ranks_)),
      small_(std::make_unique<SmallReductions>()),
      runs_beside_devices_(is_any_on_device(units_)) {}

ShardedModel::~ShardedModel() {
  for (const ParamGroupPtr& unit : units_) unit->on_gradient(nullptr);
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

std::unique_lock<std::recursive_mutex> ShardedModel::lock_hooks() {
  std::unique_lock<std::recursive_mutex> lock(hooks_mutex_, std::defer_lock);
  if (runs_beside_devices_) lock.lock();
  return lock;
}

// See NOTE [When a pass has left a unit].
bool ShardedModel::is_in_order(const ParamGroup& unit, bool is_apart) const {
  return !is_apart && (is_root(unit) || units_.front()->forward.running > 0);
}

void ShardedModel::before_forward(ParamGroup& unit, bool is_apart) {
  const auto lock = lock_hooks();  // a recomputation runs inside of a pass
  // Inside a backward pass it is a recomputation, which reads what the first computation read.
  const bool is_recomputed = is_nested_backward() && (pass_ || keeps_graph_);
  if (depth_ == 0 && !is_recomputed) {
    begin_step();
    hide_shards(true);
  }
  if (depth_ == 0 && is_recomputed && !pass_) {
    begin_pass();
    pass_->makes_graph = true;  // for all that is known here
  }
  const bool makes_graph = !pass_ && c10::GradMode::is_enabled();
  const bool is_noted = makes_graph && is_in_order(unit, is_apart);
  if (depth_ == 0 && is_noted && !awaits_backward_) graphs_begin_ = ++clock_;
  record(unit);
  if (unit.forward.running == 0) {
    unit.forward.is_kept = pass_ && (pass_->makes_graph || unit.is_in_memory());
  }
  try {
    unshard_values(unit);
  } catch (...) {
    if (depth_ == 0 && !pass_) {
      hide_shards(false);
      end_failed_reading(units_);
    }
    throw;
  }
  if (options_.forward_prefetch && !pass_) prefetch(unit, 1);
  if (unit.forward.running == 0) {
    for (const auto& flat : unit.flats()) flat->expect_no_writes();
    if (is_noted && unit.forward.begin < graphs_begin_) unit.forward.begin = ++clock_;
  }
  ++unit.forward.running;
  ++depth_;  // last: what throws has not begun
}

void ShardedModel::check_outputs(const ParamGroup& unit,
                                 const std::vector<at::Tensor>& outputs) const {
  if (is_root(unit) || !device_ranks_ || !is_on_device(unit)) return;
  if (!is_any_on_cpu(outputs)) return;
  throw ArgumentError(fmt::format(
      "libddp fsdp: unit '{}' computes on {} and has an output on the CPU that needs a gradient. A "
      "backward pass would come to it in a thread of its own, and the ranks could gather the units "
      "in different orders. Hint: move it to the CPU behind the outermost wrapped module, or "
      "detach "
      "it.",
      unit.name(), unit.flats()[0]->spec().device.str()));
}

void ShardedModel::after_forward(ParamGroup& unit, const std::vector<at::Tensor>& outputs,
                                 bool is_apart) {
  const auto lock = lock_hooks();
  try {
    for (const auto& flat : unit.flats()) flat->check_unwritten();
    if (c10::GradMode::is_enabled()) check_outputs(unit, outputs);
    if (depth_ == 1 && hides_) {
      for (const ParamGroupPtr& each : units_) each->check_rows_unwritten();
    }
  } catch (const ArgumentError& error) {
    forward_failed(unit, error.what());
    throw;
  }
  --depth_;
  --unit.forward.running;
  if (is_root(unit)) runs_in_two_threads_ = device_ranks_ && is_any_on_cpu(outputs);
  if (!pass_ && c10::GradMode::is_enabled() && is_in_order(unit, is_apart)) {
    unit.forward.end = ++clock_;
  }
  bool will_be_back = false;
  if (c10::GradMode::is_enabled()) {
    auto leaves = call_before_any_backward(
        outputs, [weak = weak_from_this(), &unit, is_apart](bool accumulates) {
          const auto self = weak.lock();
          if (!self) return;
          const auto locked = self->lock_hooks();
          self->guarded([&] { self->before_backward(unit, accumulates, is_apart); });
        });
    if (leaves) output_leaves_.push_back(std::move(leaves));
    will_be_back = std::any_of(outputs.begin(), outputs.end(), [](const at::Tensor& output) {
      return output.defined() && output.requires_grad();
    });
  }
  // Not where its backward follows at once, or a call around this one still computes with it.
  if (!unit.is_in_pass() && unit.forward.running == 0 && !lingers(unit)) {
    const bool stays = will_be_back && (is_root(unit) || unit.options().keep_unsharded);
    reshard_values(unit, /*frees=*/!stays && !unit.forward.is_kept);
  }
  if (is_root(unit) && c10::GradMode::is_enabled()) awaits_backward_ = true;
  if (depth_ > 0 || pass_) return;
  hide_shards(false);
  if (!c10::GradMode::is_enabled()) finish_copies();
  end_reading(units_, kEndOfForward);
  calls_->compare("a forward");
}

void ShardedModel::forward_failed(ParamGroup& unit, const std::string& what) {
  const auto lock = lock_hooks();
  --depth_;
  --unit.forward.running;
  // Recomputations end with an exception too, where they have all that is wanted of them.
  if (!unit.is_in_pass() && unit.forward.running == 0 && !lingers(unit)) {
    reshard_values(unit, !unit.forward.is_kept);
  }
  if (depth_ == 0 && !pass_) {
    hide_shards(false);
    end_failed_reading(units_);
  }
  if (is_root(unit)) report_error("in forward: " + what);
}

void ShardedModel::report_error(const std::string& what) const noexcept {
  if (c10::GradMode::is_enabled()) tell_others(what);
}

void ShardedModel::tell_others(const std::string& what) const noexcept {
  std::vector<const ProcessGroup*> told;
  for (const ParamGroupPtr& unit : units_) {
    const ShardOptions& options = unit->options();
    const Group& group = options.shard ? options.shard : options.replicate;
    if (!group || std::find(told.begin(), told.end(), group.get()) != told.end()) continue;
    told.push_back(group.get());
    group->report_error(what);
  }
}

bool ShardedModel::backward_failed(const std::string& what) noexcept {
  if (!std::exchange(awaits_backward_, false)) return false;
  tell_others("in backward: " + what);
  return true;
}

void ShardedModel::begin_step() {
  recover();
  for (const ParamGroupPtr& unit : units_) {
    const ShardOptions& options = unit->options();
    for (const Group* const group : {&options.shard, &options.replicate}) {
      // Alone, no collective would tell that the group has ended.
      if (!*group || (*group)->size() > 1) continue;
      if (const auto failure = (*group)->failure()) std::rethrow_exception(failure);
    }
  }
  output_leaves_.clear();
  if (options_.faces) options_.faces->take_over();
  for (const ParamGroupPtr& unit : units_) unit->take_written();
  publish();
}

// What an exception in the last step has left behind.
void ShardedModel::recover() {
  small_->abandon();
  pass_ = nullptr;
  calls_->forget();
  keeps_graph_ = false;
  hide_shards(false);
  for (const ParamGroupPtr& unit : units_) {
    unit->forward.running = 0;
    if (unit->is_in_pass()) unit->abandon();
    if (!unit->is_held()) reshard_values(*unit);
  }
}

void ShardedModel::unshard(ParamGroup& unit) {
  if (depth_ > 0 || pass_) return;  // units are unsharded where they are used
  if (unit.is_held()) return;
  begin_step();
  unshard_values(unit);
  unit.hold();
}

void ShardedModel::reshard(ParamGroup& unit) {
  if (depth_ > 0 || pass_ || !unit.is_held()) return;
  reshard_values(unit);
  unit.finish_copies();
}

void ShardedModel::unshard_values(ParamGroup& unit) {
  if (unit.unshard() && options_.faces) options_.faces->show(unit, /*whole=*/true);
}

void ShardedModel::reshard_values(ParamGroup& unit, bool frees) {
  if (unit.reshard(frees) && options_.faces) options_.faces->show(unit, /*whole=*/false);
  if (hides_) unit.hide_shards(true);
}

// See NOTE [Hidden shards]. Faces are not what a unit computes with.
void ShardedModel::hide_shards(bool hides) {
  if (options_.faces) return;
  hides_ = hides;
  for (const ParamGroupPtr& unit : units_) unit->hide_shards(hides);
}

void ShardedModel::finish_copies() {
  for (const ParamGroupPtr& unit : units_) unit->finish_copies();
}

void ShardedModel::publish() {
  for (const ParamGroupPtr& unit : units_) unit->publish();
  const std::vector<Group> readers = reading_groups(units_);
  if (readers.empty()) return;
  TrainedSet trained;
  for (const ParamGroupPtr& unit : units_) {
    for (const auto& flat : unit->flats()) trained.add(flat->trained());
  }
  const std::string label = trained.label("a sharded forward");
  for (const Group& group : readers) group->barrier({.label = label});
}

void ShardedModel::record(ParamGroup& unit) {
  calls_->note(unit, DeviceCalls::Call::Forward);
  if (std::find(order_.begin(), order_.end(), &unit) == order_.end()) order_.push_back(&unit);
}

void ShardedModel::prefetch(const ParamGroup& unit, int step) {
  const auto here = std::find(order_.begin(), order_.end(), &unit) - order_.begin();
  const auto next = here + step;
  // The root comes first in the order and stays.
  if (next < 1 || next >= static_cast<std::ptrdiff_t>(order_.size())) return;
  order_[static_cast<std::size_t>(next)]->begin_unshard();
}

void ShardedModel::before_backward(ParamGroup& unit, bool accumulates, bool is_apart) {
  if (!pass_) begin_pass();
  reach(unit, accumulates, is_apart);
  leave_units_after(unit);
  if (options_.backward_prefetch) prefetch(unit, -1);
}

void ShardedModel::reach_from_within(ParamGroup& unit) {
  const auto lock = lock_hooks();
  if (!pass_) begin_pass();
  reach(unit, /*accumulates=*/true);
}

void ShardedModel::before_backward_of_gradients(const std::vector<ParamGroup*>& units,
                                                bool accumulates) {
  if (!pass_) begin_pass();
  for (ParamGroup* const unit : units) reach(*unit, accumulates);
}

void ShardedModel::expect_backward_of_gradients() {
  // None of them is a leaf, so nothing is to be kept.
  std::ignore = call_before_any_backward(
      gradients_with_graph(),
      [weak = weak_from_this(), units = std::move(pass_->in_graph)](bool accumulates) {
        const auto self = weak.lock();
        if (!self) return;
        const auto locked = self->lock_hooks();
        self->guarded([&] { self->before_backward_of_gradients(units, accumulates); });
      });
}

void ShardedModel::reach(ParamGroup& unit, bool accumulates, bool is_apart) {
  pass_->makes_graph = c10::GradMode::is_enabled();
  if (pass_->makes_graph) pass_->in_graph.push_back(&unit);
  // Which of its outputs comes first depends on the threads.
  if (!unit.is_in_pass()) calls_->note(unit, DeviceCalls::Call::Backward);
  if (accumulates) {
    pass_->accumulates = true;
    unit.begin_pass(pass_->averages(unit), is_apart);
    if (has_late_hooks(unit)) pass_->has_late_hooks = true;
  }
  unshard_values(unit);
  if (!unit.trains_all()) pass_->lingering.push_back(&unit);
  if (!unit.trains_all() || !pass_->averages(unit)) pass_->must_meet = true;
}

void ShardedModel::begin_pass() {
  const bool is_left = std::any_of(units_.begin(), units_.end(),
                                   [](const ParamGroupPtr& unit) { return unit->is_in_pass(); });
  if (is_left && depth_ == 0) recover();
  if (options_.faces) options_.faces->take_over();
  const auto pass = std::make_shared<Pass>(weak_from_this(), syncs_);
  pass_ = pass.get();
  awaits_backward_ = true;
  call_after_backward([pass] {
    const auto self = pass->model.lock();
    if (self && self->pass_ == pass.get()) self->guarded([&] { self->end_pass(); });
    // Autograd's thread may let go of it while the next forward runs: it must not look then.
    pass->model.reset();
  });
}

ShardedModel::Pass::Pass(std::weak_ptr<ShardedModel> of, bool averages)
    : model(std::move(of)),
      syncs(averages),
      failure(std::make_unique<PassFailure>(PassFailure::of_current())) {}

// Autograd drops the callback of a pass that fails. Where averages are under way, the next forward
// waits for them: the error must come out now.
ShardedModel::Pass::~Pass() {
  const auto self = model.lock();
  if (!self || self->pass_ != this) return;
  self->pass_ = nullptr;
  if (const std::exception_ptr error = failure->error()) {
    self->backward_failed(first_line_of(error));
  }
  if (self->depth_ > 0 || !reducing.empty() || self->small_->is_running()) return;
  try {
    self->recover();
  } catch (const Error&) {
    // The next forward says what is wrong.
  }
}

// See NOTE [When a pass has left a unit].
bool ShardedModel::lingers(ParamGroup& unit) {
  if (!pass_ || !unit.has_frozen()) return false;
  pass_->lingering.push_back(&unit);
  return true;
}

// See NOTE [When a pass has left a unit].
void ShardedModel::leave_units_after(const ParamGroup& unit) {
  if (unit.forward.end <= unit.forward.begin) return;  // it has run in backward passes only
  const auto left = std::erase_if(pass_->lingering, [&](ParamGroup* other) {
    if (other->forward.begin <= unit.forward.end) return false;
    leave_unit(*other);
    return true;
  });
  if (left > 0) install_for_hooks();
}

void ShardedModel::take_gradient(ParamGroup& unit, std::size_t flat, std::size_t index) {
  if (pass_ && unit.awaits_averages()) begin_again(unit);
  unit.accumulate(flat, index);
  if (!pass_ || !unit.is_complete()) return;
  const bool is_left = unit.trains_all();
  // See NOTE [Outputs on the CPU].
  const bool waits = is_root(unit) && runs_in_two_threads_;
  if (pass_->averages(unit) && !waits) reduce(unit);
  if (!is_left) return;
  // See NOTE [Gradients that come again].
  if (is_nested_backward()) {
    pass_->lingering.push_back(&unit);
  } else {
    leave_unit(unit);
  }
}

// See NOTE [Gradients that come again].
void ShardedModel::begin_again(ParamGroup& unit) {
  std::erase(pass_->reducing, &unit);
  unit.collect();
  if (!unit.is_averaged()) {
    small_->start(/*async=*/false);
    small_->collect();
  }
  if (!has_late_hooks(unit)) unit.begin_again();
}

void ShardedModel::reduce(ParamGroup& unit) {
  calls_->note(unit, DeviceCalls::Call::Average);
  if (SmallReductions::takes(unit)) {
    small_->add(unit);
    if (small_->is_full()) small_->start(/*async=*/true);
  } else {
    collect_oldest(kMostReductions - 1);
    unit.reduce();
    pass_->reducing.push_back(&unit);
  }
  install_for_hooks();
}

void ShardedModel::collect_oldest(std::size_t most) {
  while (pass_->reducing.size() > most) {
    ParamGroup* const oldest = pass_->reducing.front();
    pass_->reducing.pop_front();
    oldest->collect();
  }
}

// See NOTE [Late hooks]. Averages that nobody waits for are installed at the end of the pass.
void ShardedModel::install_for_hooks() {
  if (!pass_->has_late_hooks) return;
  for (const ParamGroupPtr& unit : units_) {
    if (!unit->is_averaged() || unit->is_unsharded() || !has_late_hooks(*unit)) continue;
    unit->install();
    if (options_.faces) options_.faces->show_gradients(*unit);
    run_late_hooks(*unit);
  }
}

bool ShardedModel::has_late_hooks(ParamGroup& unit) const {
  return unit.has_late_hooks() || (options_.faces && options_.faces->has_late_hooks(unit));
}

void ShardedModel::run_late_hooks(ParamGroup& unit) {
  if (options_.faces) options_.faces->run_late_hooks(unit);
  unit.run_late_hooks();
}

void ShardedModel::end_pass() {
  bool must_meet = pass_->must_meet && depth_ == 0;
  // Averages of another group's units say nothing of this one's readers.
  const bool meets_by_averages = must_meet && reading_groups(units_).size() <= 1;
  if (pass_->accumulates && pass_->syncs && reduce_rest() && meets_by_averages) must_meet = false;
  if (small_->is_waiting() && meets_by_averages) must_meet = false;
  small_->start(/*async=*/false);
  collect_oldest(0);
  small_->collect();
  if (must_meet) end_reading(units_, "the end of a sharded backward pass");
  if (depth_ == 0) calls_->compare("a backward pass");
  finish_copies();
  for (const ParamGroupPtr& unit : units_) {
    leave_unit(*unit);
    unit->end_pass();
  }
  keeps_graph_ = pass_->makes_graph;
  if (keeps_graph_) expect_backward_of_gradients();
  pass_ = nullptr;
  awaits_backward_ = false;
  if (options_.faces) options_.faces->show_gradients();
  for (const ParamGroupPtr& unit : units_) run_late_hooks(*unit);
}

bool ShardedModel::shows_larger_gradients() const {
  return std::any_of(units_.begin(), units_.end(), [](const ParamGroupPtr& unit) {
    return std::any_of(unit->flats().begin(), unit->flats().end(), [](const auto& flat) {
      return flat->accumulated().shows_larger_gradients();
    });
  });
}

void ShardedModel::average_waiting() {
  if (depth_ > 0 || pass_ || !syncs_) return;
  if (options_.faces) options_.faces->take_over();
  Pass pass(weak_from_this(), /*averages=*/true);
  pass.accumulates = true;
  pass_ = &pass;
  end_pass();
}

// Units of which some parameter got no gradient, and those that passes without
// synchronisation have left something in. Backwards, as passes go; the same on every rank.
bool ShardedModel::reduce_rest() {
  bool is_any = false;
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if ((*unit)->is_reducing() || !(*unit)->syncs()) continue;
    if (!(*unit)->is_in_pass() && !(*unit)->has_waiting()) continue;
    (*unit)->begin_pass(/*averages=*/true);
    if (!(*unit)->wants_average()) continue;
    is_any = true;
    reduce(**unit);
  }
  return is_any;
}

void ShardedModel::show_copies(const std::vector<ParamGroupPtr>& units,
                               const CopyOptions& options) {
  if (depth_ > 0 || pass_) {
    throw StateError(
        "libddp fsdp: parameters cannot be summoned inside a forward or backward pass. Hint: call "
        "summon_full_params between steps.");
  }
  for (const ParamGroupPtr& unit : units) {
    for (const auto& flat : unit->flats()) flat->copies().check(options);
  }
  // A parameter that showed a tensor of inference mode could not be trained afterwards.
  const c10::InferenceMode normal(false);
  begin_step();
  for (const ParamGroupPtr& unit : units) {
    reshard_values(*unit, /*frees=*/false);
    for (const auto& flat : unit->flats()) flat->check_shards();
  }
  for (const ParamGroupPtr& unit : units) {
    for (const auto& flat : unit->flats()) {
      flat->copies().show(options);
      flat->memory().reshard();
    }
  }
  // Nobody changes what others still copy.
  meet_readers(units, {.label = "full parameters are copied"});
}

void ShardedModel::end_copies(const std::vector<ParamGroupPtr>& units, bool keep) {
  const c10::InferenceMode normal(false);
  std::exception_ptr problem;
  for (const ParamGroupPtr& unit : units) {
    for (const auto& flat : unit->flats()) {
      try {
        flat->copies().end(keep);
      } catch (const StateError&) {
        if (!problem) problem = std::current_exception();
      }
    }
  }
  if (problem) std::rethrow_exception(problem);
}

}  // namespace libddp
