#include "libddp/ddp/reducer.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/autograd/graph_task.h"
#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/base/group_identity.h"
#include "libddp/base/log.h"
#include "libddp/ddp/finite_check.h"
#include "libddp/ddp/parameter_usage.h"
#include "libddp/memory/empty_cache.h"

namespace libddp {
namespace {

std::vector<at::Tensor> tensors_of(const NamedTensors& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

std::string where_of(const ProcessGroup& group) {
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
      sparse_(parameters_, options_.sparse_parameters, group_),
      slots_(parameters_, where("backward"), options_.gradient_as_bucket_view),
      order_(sizes_of(parameters_), options_.limits, sparse_.indices()),
      reduction_(group_),
      slow_ranks_(group_),
      pass_(parameters_.size()),
      hooks_(tensors_of(parameters_),
             [this](std::size_t index) { guarded([&] { autograd_hook(index); }); }) {
  build_buckets(order_.first_plan());
  if (options_.static_graph) set_static_graph();
}

std::string Reducer::where(const char* what) const { return where_of(*group_) + ' ' + what; }

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  timeline_.end_forward();
  ensure_prior_reduction_finished();
  rebuild_buckets();
  restart_pass(Stage::Armed);
  // The hooks live as long as the graph, which may outlive the reducer.
  output_leaves_ = nullptr;
  output_leaves_ = call_before_backward(
      outputs, [weak = weak_from_this(), pass = std::make_shared<std::uint64_t>()] {
        if (const auto self = weak.lock()) self->guarded([&] { self->on_output_reached(*pass); });
      });
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

void Reducer::autograd_hook(std::size_t index) {
  if (c10::GradMode::is_enabled()) check_create_graph(index);
  if (pass_.is_armed() && !is_of_other_pass(index)) begin_pass(PassEnd::MaybeNested);
  take(index);
  if (pass_.is_running()) mark_ready(index);
}

bool Reducer::is_of_other_pass(std::size_t index) const {
  return slots_[index].is_common() && slots_[index].user().is_in_pass();
}

void Reducer::take(std::size_t index) {
  if (sparse_.contains(index)) {
    slots_.take_without_bucket(index);
    return sparse_.check(index);
  }
  slots_.take(index, pass_.is_running());
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

void Reducer::mark_ready(std::size_t index) {
  if (pass_.stage() == Stage::Reopened) queue_finalization(PassEnd::MaybeNested);
  order_.record(index);
  const std::uint32_t num_fired = pass_.count(index);
  if (sparse_.contains(index)) return;
  const std::size_t bucket = buckets_->bucket_of(index);
  if (num_fired > order_.num_expected(index)) {
    // Until the bucket is sent, a further share of a gradient does no harm.
    if (pass_.is_sent(bucket))
      order_.refuse_second_gradient(index, where("backward"), slots_[index].name());
  } else if (num_fired == order_.num_expected(index) && pass_.mark_ready(bucket)) {
    timeline_.ready(bucket);
    launch_ready_buckets();
  }
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
    for (const GradientSlot& slot : reducer.slots_) parameters_.add(slot.user());
  }
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;
  ~PassGuard() {
    const auto self = is_over_ ? nullptr : reducer_.lock();
    if (!self || self->pass_.number() != number_) return;
    self->break_off(failure_.error());
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
    if (const auto self = weak.lock()) self->guarded([&] { self->on_pass_end(end); });
  });
}

// Also before the pass has reached the model's outputs: the others are in theirs by now.
bool Reducer::backward_failed(const std::string& what) noexcept {
  const bool is_known = pass_.stage() != Stage::None || std::exchange(is_refused_, false);
  if (pass_.stage() == Stage::None || pass_.is_explained()) return is_known;
  pass_.told(Told::Explained);
  group_->report_error("in backward: " + reduction_.hook_failure() + what);
  return is_known;
}

void Reducer::break_off(const std::exception_ptr& error) noexcept {
  if (error) return break_pass("in backward: " + first_line_of(error), Told::Explained);
  break_pass("in backward: an exception ended it (its own output has the text)", Told::Error);
}

void Reducer::break_pass(const std::string& what, Told told) noexcept {
  if (!pass_.is_running()) return;
  group_->report_error(what);
  pass_.told(told);
  pass_.break_off();
}

void Reducer::launch_ready_buckets() {
  const std::lock_guard<std::mutex> lock(launch_mutex_);
  // The last one is left to the end of the pass, which waits for it anyway: an inline call there
  // spares the hand-over to another thread.
  while (!pass_.is_last_next() && pass_.is_ready(pass_.num_sent())) {
    launch(pass_.take_next(), true);
  }
}

void Reducer::launch(std::size_t bucket, bool async) {
  fill(bucket);
  if (checks_gradients_) refuse_non_finite(bucket);
  timeline_.launched(bucket);
  const bool is_skipped = options_.skip_unused_buckets && can_skip(bucket);
  const bool is_in_flight =
      !is_skipped && reduction_.start(*buckets_, bucket, parameters_,
                                      {.async = async, .scatters = scatters_averages()});
  if (!is_in_flight) timeline_.done(bucket);
}

// What no gradient has come for, and the flags.
void Reducer::fill(std::size_t bucket) {
  if (pass_.is_empty()) {
    buckets_->flat(bucket).zero_();
    return;
  }
  bool is_missing = false;
  const std::vector<std::size_t>& members = buckets_->members(bucket);
  for (std::size_t member = 0; member < members.size(); ++member) {
    const std::size_t index = members[member];
    const bool used = is_used(index);
    if (pass_.num_fired(index) == 0) slots_.fill_without_gradient(index);
    if (tolerates_unused()) buckets_->set_used(bucket, member, used);
    is_missing |= !used;
  }
  buckets_->set_missing(bucket, is_missing);
}

bool Reducer::can_skip(std::size_t bucket) const {
  const std::vector<std::size_t>& members = buckets_->members(bucket);
  return std::none_of(members.begin(), members.end(),
                      [this](std::size_t index) { return is_used(index); });
}

// The abort tells all ranks in the same step; nobody averages what is no number.
void Reducer::refuse_non_finite(std::size_t bucket) {
  const auto index = first_non_finite(*buckets_, bucket);
  if (!index) return;
  const std::string what =
      fmt::format("the gradient of parameter '{}' ({}) on rank {} is NaN or infinite",
                  slots_[*index].name(), buckets_->label(bucket), group_->rank());
  group_->abort(what + ". Hint: look at that rank's batch and loss");
  throw StateError(fmt::format(
      "{}: {}. Hint: look at this rank's batch and loss; LIBDDP_NAN_CHECK=off averages it all the "
      "same.",
      where("backward"), what));
}

void Reducer::on_pass_end(PassEnd end) {
  if (!pass_.is_running()) return;
  if (end == PassEnd::MaybeNested && is_nested_backward() && !is_complete()) {
    // The outer pass goes on; its next gradient queues the end again.
    pass_.reopen();
    return;
  }
  if (is_manual_) return send_rest(true);
  finalize_backward();
}

void Reducer::run_empty_pass() {
  ensure_prior_reduction_finished();
  rebuild_buckets();
  restart_pass(Stage::Running);
  pass_.begin_empty();
  timeline_.begin_pass(pass_.number());
  finalize_backward();
}

bool Reducer::is_complete() const {
  if (!pass_.are_all_ready()) return false;
  for (const std::size_t index : sparse_.indices()) {
    if (pass_.num_fired(index) < order_.num_expected(index)) return false;
  }
  return true;
}

void Reducer::finalize_backward() {
  try {
    send_rest(false);
    take_averages();
  } catch (...) {
    if (options_.after_pass) options_.after_pass();
    throw;
  }
  if (options_.after_pass) options_.after_pass();
}

// An inline call for the last bucket spares the hand-over to another thread.
void Reducer::send_rest(bool last_is_async) {
  if (pass_.are_all_sent() && pass_.num_sent() > 0) return;  // by hand, before
  timeline_.end_backward();
  const std::lock_guard<std::mutex> lock(launch_mutex_);
  while (!pass_.are_all_sent()) {
    const bool is_last = pass_.is_last_next();
    launch(pass_.take_next(), last_is_async || !is_last);
  }
}

void Reducer::take_averages() {
  bool is_missing = collect_results();
  is_missing |= average_sparse_gradients();
  timeline_.end_pass();
  slow_ranks_.end_pass(timeline_);
  // From here on all ranks know the same.
  pass_.end();
  if (is_missing && !tolerates_unused()) refuse_unused();
  if (is_missing && !pass_.is_empty()) install_gradients_of_others();
  slots_.install_copies();
  if (order_.is_learning()) learn();
  slots_.settle();
  if (reduction_.sharded().scatters()) slots_.mark_averaged_in_part();
}

// Whether some rank has no gradient for some parameter.
bool Reducer::collect_results() {
  reduction_.finish(*buckets_, scatters_averages(),
                    [this](std::size_t bucket, std::int64_t ns) { timeline_.done(bucket, ns); });
  bool is_missing = false;
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    is_missing |= buckets_->is_missing(bucket);
  }
  return is_missing;
}

// Whether some rank has no gradient for some of them.
bool Reducer::average_sparse_gradients() {
  using Share = SparseGradients::Share;
  std::vector<Share> shares;
  for (const std::size_t index : sparse_.indices()) {
    shares.push_back(pass_.is_empty() ? Share::Absent
                                      : (is_used(index) ? Share::Used : Share::Missing));
  }
  return reduction_.average(sparse_, shares, buckets_->size());
}

bool Reducer::is_used(std::size_t index) const {
  return pass_.num_fired(index) > 0 || slots_.has_own(index);
}

void Reducer::refuse_unused() {
  std::vector<std::string> names;
  std::vector<std::uint8_t> unused;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    names.push_back(slots_[index].name());
    unused.push_back(is_used(index) || pass_.is_empty() ? 0 : 1);
  }
  slots_.settle();
  is_refused_ = true;
  throw StateError(describe_unused(*group_, names, unused));
}

void Reducer::install_gradients_of_others() {
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    const std::vector<std::size_t>& members = buckets_->members(bucket);
    for (std::size_t member = 0; member < members.size(); ++member) {
      // A parameter that no rank used keeps its `.grad` as it was, None included.
      if (!is_used(members[member]) && buckets_->is_used(bucket, member)) {
        slots_[members[member]].install();
      }
    }
  }
}

void Reducer::learn() {
  order_.learn(*group_, buckets_->plan());
  // The gradients move along.
  if (order_.has_plan() && reduction_.sharded().has_owners()) rebuild_buckets();
  describe_layout();
  // Counts of a pass without data say nothing: buckets then wait for the end of each pass.
  if (options_.static_graph && !pass_.is_empty()) order_.expect(pass_.num_fired());
}

void Reducer::set_static_graph() {
  if (!order_.is_learning() || pass_.is_unfinished()) {
    throw StateError(
        "libddp: the static graph must be declared before the first backward pass. Hint: pass "
        "static_graph=True to DistributedDataParallel.");
  }
  const bool had_usage = tolerates_unused();
  options_.static_graph = true;
  // Nothing is complete before the end of the first pass: only then the counts are known.
  order_.expect_unknown();
  if (had_usage) return;
  build_buckets(buckets_->plan());
  restart_pass(pass_.stage());
}

void Reducer::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (reduction_.sharded().has_owners()) {
    throw StateError(
        "libddp: a communication hook cannot exchange the gradients of an optimizer whose work is "
        "shared. Hint: "
        "make the optimizer without shard_over.");
  }
  if (reduction_.has_hook()) {
    throw StateError(
        "libddp: register_comm_hook or register_builtin_comm_hook can only be called once. Hint: "
        "wrap the model again to use another hook.");
  }
  if (!order_.is_learning() || pass_.is_unfinished()) {
    throw StateError(
        "libddp: a communication hook must be registered before the first backward pass. Hint: "
        "call register_comm_hook right after wrapping the model.");
  }
  reduction_.set_hook(std::move(hook), sparse_.indices().size(),
                      [this](std::size_t bucket) { timeline_.done(bucket); });
}

void Reducer::accept_gradients_of(at::ScalarType dtype) {
  for (GradientSlot& slot : slots_) slot.also_accept(dtype);
  sparse_.also_accept(dtype);
}

void Reducer::follow_dtypes() {
  if (reduction_.sharded().has_owners()) {
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
  order_.restart(sizes_of(parameters_));
  build_buckets(order_.first_plan());
  restart_pass(pass_.stage());
}

void Reducer::build_buckets(BucketPlan plan) {
  buckets_ = nullptr;
  for (GradientSlot& slot : slots_) slot.leave_bucket();
  buckets_ =
      std::make_shared<GradientBuckets>(*group_, parameters_, order_.sizes(), std::move(plan),
                                        tolerates_unused(), reduction_.sharded().num_owners());
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (!sparse_.contains(index)) slots_[index].move_to(buckets_->view(index));
  }
  // What the last ones had and these don't fit into, and what the model came through when it was
  // wrapped: no step asks for that again.
  empty_cache();
  describe_layout();
}

void Reducer::describe_layout() {
  const bool is_rebuilt = !order_.is_learning() && !order_.has_plan();
  BucketLayout layout = describe_buckets(*group_, parameters_, *buckets_, is_rebuilt);
  for (const std::size_t index : sparse_.indices()) {
    layout.sparse_names.push_back(parameters_[index].name);
  }
  timeline_.set_layout(std::make_shared<const BucketLayout>(std::move(layout)));
}

void Reducer::rebuild_buckets() {
  if (order_.has_plan()) build_buckets(order_.take_plan());
}

void Reducer::restart_pass(Stage stage) {
  pass_.restart(stage, *buckets_, order_.num_expected());
  order_.forget_fired();
  reduction_.forget();
  slots_.forget_copies();
}

void Reducer::ensure_prior_reduction_finished() {
  if (const std::exception_ptr failure = group_->failure()) std::rethrow_exception(failure);
  if (!pass_.is_unfinished()) return;
  if (is_manual_ && pass_.are_all_sent()) check_finalized();
  if (pass_.stage() == Stage::Reopened) {
    throw StateError(fmt::format(
        "{} forward: the last backward pass ended inside another one before all gradients were "
        "there, so nothing was averaged. Hint: return tensors from forward() directly or in "
        "tuples, lists, dicts or dataclasses, or use checkpoint(..., use_reentrant=False).",
        where_of(*group_)));
  }
  pass_.check_not_ended_early(where("forward"));
}

void Reducer::set_manual_finalization(bool manual) {
  if (pass_.is_unfinished()) {
    throw StateError(
        "libddp: manual finalization can be switched only between backward passes. Hint: set it "
        "before forward, or after finalize_backward().");
  }
  is_manual_ = manual;
}

bool Reducer::should_finalize_after_backward() const {
  return is_manual_ && (tolerates_unused() || needs_pass_end());
}

void Reducer::finalize_backward_manual() {
  const auto refuse = [&](const char* why) {
    throw StateError(fmt::format("{} finalize_backward: {}", where_of(*group_), why));
  };
  if (!is_manual_) {
    refuse("backward passes end by themselves. Hint: set require_manual_backward_finalization.");
  }
  if (!pass_.is_unfinished()) {
    refuse("no backward pass waits for it. Hint: call it once after each synchronising backward.");
  }
  if (!pass_.are_all_sent() && !is_complete()) {
    refuse("called before all gradients were there. Hint: call it after backward().");
  }
  if (needs_pass_end() && is_nested_backward()) {
    refuse(
        "with mixed precision and with sparse gradients, the pass must be over. Hint: call it "
        "after backward().");
  }
  finalize_backward();
}

void Reducer::check_finalized() const {
  if (!pass_.is_unfinished()) return;
  throw StateError(fmt::format(
      "{} the last backward pass has sent {} of {} buckets and was not finished. Hint: {}.",
      where_of(*group_), pass_.num_sent(), buckets_->size(),
      is_manual_ ? "call finalize_backward() after backward()"
                 : "look for the exception that it raised"));
}

void Reducer::shard(bool averages) {
  const auto refuse = [](const char* why, const char* hint) {
    throw StateError(
        fmt::format("libddp: the optimizer's work cannot be shared: {}. Hint: {}.", why, hint));
  };
  if (reduction_.sharded().has_owners()) {
    refuse("another optimizer shares it already", "wrap the model again for another one");
  }
  if (reduction_.has_hook()) {
    refuse("a communication hook exchanges the gradients", "use an optimizer without shard_over");
  }
  if (!sparse_.indices().empty()) {
    refuse("some gradients are sparse", "use an optimizer without shard_over");
  }
  if (pass_.is_unfinished()) refuse("a backward pass runs", "make the optimizer before it");
  if (averages && !options_.gradient_as_bucket_view) {
    refuse("its gradients are no views of their buckets, of which it would share out the averages",
           "leave out gradient_as_bucket_view=False or shard_gradients");
  }
  claim_parameters();
  check_users();
  reduction_.sharded().begin(averages);
  build_buckets(order_.has_plan() ? order_.take_plan() : buckets_->plan());
  restart_pass(pass_.stage());
}

void Reducer::prepare_for_local_backward(const std::vector<at::Tensor>& outputs) {
  if (!scatters_averages()) return;
  output_leaves_ = nullptr;
  output_leaves_ = call_before_backward(outputs, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->spread_averages();
  });
}

void Reducer::spread_averages() {
  if (scatters_averages()) reduction_.sharded().spread(slots_, *buckets_);
}

template <typename Function>
void Reducer::guarded(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    break_pass(std::string("in backward: ") + error.what(), Told::Explained);
    if (options_.rethrow) options_.rethrow(std::current_exception());
    throw;
  } catch (...) {
    break_pass(
        "in backward: " + reduction_.hook_failure() + first_line_of(std::current_exception()),
        Told::Error);
    // A hook may throw anything of the language that it is written in.
    if (reduction_.has_hook() && options_.rethrow) options_.rethrow(std::current_exception());
    throw;
  }
}

}  // namespace libddp
