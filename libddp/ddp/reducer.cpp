#include "libddp/ddp/reducer.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/autograd/graph_task.h"
#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"
#include "libddp/base/log.h"
#include "libddp/ddp/compress_hook.h"

namespace libddp {
namespace {

std::vector<at::Tensor> tensors_of(const NamedTensors& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

bool is_any_on_device(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return !tensor.device().is_cpu(); });
}

std::string who_is(const ProcessGroup& group) {
  return GroupIdentity{group.name(), group.rank(), group.size()}.where();
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(NamedTensors parameters, Group group,
                                         ReducerOptions options) {
  return std::shared_ptr<Reducer>(
      new Reducer(std::move(parameters), std::move(group), std::move(options)));
}

Reducer::Reducer(NamedTensors parameters, Group group, ReducerOptions options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      pass_(parameters_.size()),
      sparse_(parameters_, options_.sparse_parameters, group_),
      slots_(parameters_, where("backward"), options_.gradient_as_bucket_view),
      usage_(group_, pass_, slots_, options_.find_unused_parameters || options_.static_graph),
      sharded_(group_),
      buckets_(group_, {parameters_, sparse_, usage_, sharded_, slots_, timeline_},
               options_.limits),
      reduction_(group_, sharded_),
      launcher_(group_, {parameters_, pass_, buckets_, usage_, reduction_, timeline_},
                options_.skip_unused_buckets),
      manual_(who_is(*group_), pass_),
      errors_(group_, pass_, reduction_, std::move(options_.rethrow)),
      slow_ranks_(group_),
      hooks_(tensors_of(parameters_), [this](std::size_t index, const at::Tensor& incoming) {
        const auto lock = lock_hooks();
        errors_.guarded([&] {
          slots_[index].notice(incoming);
          autograd_hook(index);
        });
      }) {
  runs_beside_devices_ = is_any_on_device(tensors_of(parameters_));
  if (options_.static_graph) set_static_graph();
}

std::string Reducer::where(const char* what) const { return who_is(*group_) + ' ' + what; }

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  timeline_.end_forward();
  ensure_prior_reduction_finished();
  buckets_.rebuild_as_learned();
  restart_pass(Stage::Armed);
  runs_beside_devices_ |= is_any_on_device(outputs);
  // The hooks live as long as the graph, which may outlive the reducer.
  output_leaves_ = nullptr;
  output_leaves_ = call_before_backward(
      outputs, [weak = weak_from_this(), pass = std::make_shared<std::uint64_t>()] {
        const auto self = weak.lock();
        if (!self) return;
        const auto lock = self->lock_hooks();
        self->errors_.guarded([&] { self->on_output_reached(*pass); });
      });
}

std::unique_lock<std::mutex> Reducer::lock_hooks() {
  std::unique_lock<std::mutex> lock(hooks_mutex_, std::defer_lock);
  if (runs_beside_devices_) lock.lock();
  return lock;
}

void Reducer::ensure_prior_reduction_finished() {
  // One that was left has ended for good, whatever it had failed of: not the other ranks' doing.
  group_->connect(c10::kCPU);
  if (const std::exception_ptr failure = group_->failure()) std::rethrow_exception(failure);
  if (!pass_.is_unfinished()) return usage_.check_shared();
  if (manual_.is_on() && pass_.are_all_sent()) check_finalized();
  pass_.check_not_ended_early(where("forward"));
}

void Reducer::restart_pass(Stage stage) {
  pass_.restart(stage, buckets_.current(), buckets_.order().num_expected());
  buckets_.order().forget_fired();
  reduction_.forget();
  slots_.forget_copies();
}

void Reducer::on_output_reached(std::uint64_t& pass_of_forward) {
  if (!pass_.is_running()) begin_pass_at_output(pass_of_forward != 0);
  pass_of_forward = pass_.number();
}

void Reducer::begin_pass_at_output(bool is_again) {
  static std::atomic<bool> has_told{false};
  if (is_again) {
    tell_once(has_told, "second_backward",
              "every backward pass through a forward averages, torch's DDP only the first one");
  }
  // A pass has ended since this forward, well or not: another forward's, or one through this one
  // that kept the graph.
  if (pass_.stage() == Stage::Broken) pass_.check_not_ended_early(where("backward"));
  if (!pass_.is_armed()) restart_pass(Stage::Armed);
  spread_averages();
  begin_pass(PassEnd::Certain);
}

void Reducer::spread_averages() {
  if (scatters_averages()) sharded_.spread(slots_, buckets_.current());
}

void Reducer::begin_pass(PassEnd end) {
  pass_.begin();
  timeline_.begin_pass(pass_.number());
  queue_finalization(end);
}

/// Autograd drops the callbacks of a pass that fails without a call: that is how its failure shows.
class Reducer::PassGuard {
 public:
  explicit PassGuard(Reducer& reducer)
      : reducer_(reducer.weak_from_this()), number_(reducer.pass_.number()) {
    if (!ParameterUser::is_any_common()) return;
    for (const GradientSlot& slot : reducer.slots_) parameters_.add(slot.user());
  }
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;
  ~PassGuard() {
    const auto self = is_over_ ? nullptr : reducer_.lock();
    if (!self || self->pass_.number() != number_) return;
    self->errors_.break_off(failure_.error());
    end_after_failure(*self);
  }
  void end() { is_over_ = true; }

 private:
  static void end_after_failure(const Reducer& reducer) noexcept {
    // A pass around it may go on.
    if (!reducer.options_.after_pass || is_nested_backward()) return;
    try {
      reducer.options_.after_pass();
    } catch (const std::exception& error) {
      log(LogLevel::Error, "after_pass", {{"error", error.what()}});
    }
  }

  const std::weak_ptr<Reducer> reducer_;
  const std::uint64_t number_;
  const PassFailure failure_ = PassFailure::of_current();
  ParameterPass parameters_;
  bool is_over_ = false;
};

void Reducer::queue_finalization(PassEnd end) {
  pass_.run();
  call_after_backward([weak = weak_from_this(), end, guard = std::make_shared<PassGuard>(*this)] {
    guard->end();
    const auto self = weak.lock();
    if (!self) return;
    const auto lock = self->lock_hooks();
    self->errors_.guarded([&] { self->on_pass_end(end); });
  });
}

void Reducer::autograd_hook(std::size_t index) {
  if (c10::GradMode::is_enabled()) check_create_graph(index);
  if (pass_.is_armed() && !is_of_other_pass(index)) begin_pass(PassEnd::MaybeNested);
  take(index);
  if (pass_.is_running()) mark_ready(index);
}

bool Reducer::is_of_other_pass(std::size_t index) const {
  return slots_[index].is_common() && slots_[index].user().is_in_pass();
}

// As in torch: `.grad` holds the averages and has this rank's graph.
void Reducer::check_create_graph(std::size_t index) const {
  if (scatters_averages()) {
    throw StateError(fmt::format(
        "{}: parameter '{}': backward(create_graph=True) does not go together with an optimizer "
        "that shares out the averages. Hint: make it without shard_gradients.",
        where("backward"), slots_[index].name()));
  }
  static std::atomic<bool> has_told{false};
  tell_once(has_told, "create_graph",
            "gradients are averaged, the gradients of gradients stay each rank's own");
}

void Reducer::tell_once(std::atomic<bool>& has_told, const char* event, const char* what) const {
  if (group_->rank() != 0 || has_told.exchange(true)) return;
  log(LogLevel::Warn, event, {{"group", group_->name()}, {"what", what}});
}

void Reducer::take(std::size_t index) {
  const bool keeps_none = usage_.tolerates_unused();
  if (sparse_.contains(index)) {
    slots_.take_without_bucket(index, keeps_none);
    return sparse_.check(index);
  }
  slots_.take(index, pass_.is_running(), keeps_none);
}

void Reducer::mark_ready(std::size_t index) {
  if (pass_.stage() == Stage::Reopened) queue_finalization(PassEnd::MaybeNested);
  BucketOrder& order = buckets_.order();
  order.record(index);
  const std::uint32_t num_fired = pass_.count(index);
  if (sparse_.contains(index)) return;
  const std::size_t bucket = buckets_.current().bucket_of(index);
  if (num_fired > order.num_expected(index)) {
    // Until the bucket is sent, a further share of a gradient does no harm.
    if (pass_.is_sent(bucket))
      order.refuse_second_gradient(index, where("backward"), slots_[index].name());
  } else if (num_fired == order.num_expected(index) && pass_.mark_ready(bucket)) {
    timeline_.ready(bucket);
    launcher_.launch_complete();
  }
}

void Reducer::on_pass_end(PassEnd end) {
  if (!pass_.is_running()) return;
  if (end == PassEnd::MaybeNested && is_nested_backward() && !is_complete()) {
    // The outer pass goes on; its next gradient queues the end again.
    pass_.reopen();
    return;
  }
  if (manual_.is_on()) return launcher_.launch_rest(true);
  finalize_backward();
}

bool Reducer::is_complete() const {
  if (!pass_.are_all_ready()) return false;
  for (const std::size_t index : sparse_.indices()) {
    if (pass_.num_fired(index) < buckets_.order().num_expected(index)) return false;
  }
  return true;
}

void Reducer::finalize_backward() {
  try {
    launcher_.launch_rest(false);
    take_averages();
  } catch (...) {
    if (options_.after_pass) options_.after_pass();
    throw;
  }
  if (options_.after_pass) options_.after_pass();
}

void Reducer::take_averages() {
  // Whether some rank has no gradient for some parameter.
  bool is_missing = launcher_.collect();
  is_missing |= reduction_.average(sparse_, usage_.shares_of(sparse_.indices()), num_buckets());
  timeline_.end_pass();
  slow_ranks_.end_pass(timeline_);
  // From here on all ranks know the same.
  pass_.end();
  if (is_missing && !usage_.tolerates_unused()) {
    errors_.all_refuse();
    usage_.refuse_unused();
  }
  if (is_missing && !pass_.is_empty()) usage_.install_gradients_of_others(buckets_.current());
  slots_.install_copies();
  if (buckets_.order().is_learning()) learn();
  slots_.settle();
  if (sharded_.scatters()) slots_.mark_averaged_in_part();
}

void Reducer::learn() {
  buckets_.learn(options_.static_graph);
  // Counts of a pass without data say nothing: buckets then wait for the end of each pass.
  if (options_.static_graph && !pass_.is_empty()) buckets_.order().expect(pass_.num_fired());
}

void Reducer::run_empty_pass() {
  ensure_prior_reduction_finished();
  buckets_.rebuild_as_learned();
  restart_pass(Stage::Running);
  pass_.begin_empty();
  timeline_.begin_pass(pass_.number());
  finalize_backward();
}

void Reducer::finalize_backward_manual() {
  manual_.check_may_finalize(is_complete(), needs_pass_end());
  finalize_backward();
}

void Reducer::set_static_graph() {
  if (!buckets_.order().is_learning() || pass_.is_unfinished()) {
    throw StateError(
        "libddp: the static graph must be declared before the first backward pass. Hint: pass "
        "static_graph=True to DistributedDataParallel.");
  }
  const bool had_flags = usage_.tolerates_unused();
  options_.static_graph = true;
  usage_.tolerate_unused();
  // Nothing is complete before the end of the first pass: only then the counts are known.
  buckets_.order().expect_unknown();
  if (had_flags) return;
  buckets_.rebuild();
  restart_pass(pass_.stage());
}

void Reducer::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  reduction_.check_may_have_hook();
  if (!hook) throw ArgumentError("libddp: register_comm_hook: the communication hook is null.");
  if (!buckets_.order().is_learning() || pass_.is_unfinished()) {
    throw StateError(
        "libddp: a communication hook must be registered before the first backward pass. Hint: "
        "call register_comm_hook right after wrapping the model.");
  }
  if (!is_compress_hook(*hook)) {
    buckets_.order().follow_torch(options_.static_graph || !options_.find_unused_parameters);
  }
  reduction_.set_hook(std::move(hook), sparse_.indices().size(),
                      [this](std::size_t bucket) { timeline_.done(bucket); });
  buckets_.pack();
  restart_pass(pass_.stage());
}

void Reducer::accept_gradients_of(at::ScalarType dtype) {
  slots_.also_accept(dtype);
  sparse_.also_accept(dtype);
}

void Reducer::follow_dtypes() {
  if (sharded_.has_owners()) {
    throw ArgumentError(
        "libddp: the parameters have another dtype than when an optimizer began to share its work "
        "over their ranks. Hint: convert the model first, then wrap it and make the optimizer.");
  }
  ensure_prior_reduction_finished();
  static std::atomic<bool> has_told{false};
  tell_once(has_told, "dtype_changed",
            "parameters have another dtype than when they were wrapped; their gradients are "
            "averaged all the same, torch's DDP stops doing so");
  sparse_.follow_dtypes();
  buckets_.follow_dtypes();
  restart_pass(pass_.stage());
}

void Reducer::shard(bool averages) {
  sharded_.check_may_begin({.scatters = averages,
                            .has_hook = reduction_.has_hook(),
                            .has_sparse = !sparse_.indices().empty(),
                            .is_in_pass = pass_.is_unfinished(),
                            .as_bucket_view = options_.gradient_as_bucket_view.value_or(true)});
  claim_parameters();
  check_users();
  sharded_.begin(averages);
  if (averages) slots_.stay_in_buckets();  // where their owners look for them
  buckets_.rebuild();
  restart_pass(pass_.stage());
}

void Reducer::prepare_for_local_backward(const std::vector<at::Tensor>& outputs) {
  if (!scatters_averages()) return;
  runs_beside_devices_ |= is_any_on_device(outputs);
  output_leaves_ = nullptr;
  output_leaves_ = call_before_backward(outputs, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    const auto lock = self->lock_hooks();
    self->spread_averages();
  });
}

}  // namespace libddp
