#include "libddp/ddp/reducer.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/base/group_identity.h"
#include "libddp/base/log.h"

namespace libddp {
namespace {

std::vector<at::Tensor> tensors_of(const NamedTensors& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(NamedTensors parameters, Group group,
                                         ReducerOptions options) {
  return std::shared_ptr<Reducer>(
      new Reducer(std::move(parameters), std::move(group), std::move(options)));
}

Reducer::Reducer(NamedTensors parameters, Group group, ReducerOptions options)
    : parameters_(std::move(parameters)),
      sizes_(sizes_of(parameters_)),
      group_(std::move(group)),
      // Another library's group may know more than this about who is there.
      is_alone_(group_->size() == 1 && group_->backend_name().rfind("c10d:", 0) != 0),
      options_(std::move(options)),
      sparse_(parameters_, options_.sparse_parameters, group_),
      slow_ranks_(group_->size()),
      pass_(parameters_.size()),
      num_expected_(parameters_.size(), 1),
      gradient_states_(parameters_.size(), GradientState::Settled),
      hooks_(tensors_of(parameters_),
             [this](std::size_t index) { guarded([&] { on_gradient(index); }); }) {
  for (const auto& [name, tensor] : parameters_) {
    slots_.emplace_back(name, tensor, where());
    if (!options_.gradient_as_bucket_view) slots_.back().keep_apart();
  }
  build_buckets(plan_of(reverse_order(parameters_.size())));
  if (options_.static_graph) set_static_graph();
}

std::string Reducer::where() const {
  return GroupIdentity{group_->name(), group_->rank(), group_->size()}.where() + " backward";
}

void Reducer::arm(const std::vector<at::Tensor>& outputs) {
  timeline_.end_forward();
  check_last_pass();
  rebuild_if_planned();
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
  pass_of_forward = pass_number_;
}

void Reducer::begin_pass_at_output(bool is_again) {
  static std::atomic<bool> has_told{false};
  if (is_again) {
    tell_once(has_told, "second_backward",
              "every backward pass through a forward averages, torch's DDP only the first one");
  }
  // A pass has ended since this forward, well or not: another forward's, or one through this one
  // that kept the graph.
  if (pass_.stage == Stage::Broken) refuse_rest_of_last_pass(where());
  if (pass_.stage != Stage::Armed) restart_pass(Stage::Armed);
  spread_averages();
  begin_pass(PassEnd::Certain);
}

void Reducer::on_gradient(std::size_t index) {
  if (c10::GradMode::is_enabled()) check_create_graph(index);
  if (pass_.stage == Stage::Armed && !is_of_other_pass(index)) begin_pass(PassEnd::MaybeNested);
  take(index);
  if (pass_.is_running()) count_gradient(index);
}

bool Reducer::is_of_other_pass(std::size_t index) const {
  return slots_[index].is_common() && slots_[index].user().is_in_pass();
}

void Reducer::take(std::size_t index) {
  GradientState& state = gradient_states_[index];
  if (state == GradientState::AveragedInPart) refuse_old_average(index);
  state = GradientState::Own;
  if (sparse_.contains(index)) return sparse_.check(index);
  GradientSlot& slot = slots_[index];
  // With create_graph=True autograd has put a tensor there that has a graph of its own.
  const bool stays_apart = slot.is_apart() || c10::GradMode::is_enabled();
  if (stays_apart && !pass_.is_running()) return slot.take_dtype();
  if (!stays_apart) return slot.adopt();
  slot.copy_to_bucket();
  state = GradientState::Copied;
}

// As in torch: `.grad` holds the averages and has this rank's graph.
void Reducer::check_create_graph(std::size_t index) const {
  if (scatters_averages()) {
    throw StateError(fmt::format(
        "{}: parameter '{}': backward(create_graph=True) does not go together with an optimizer "
        "that shares out the averages. Hint: make it without shard_gradients.",
        where(), slots_[index].name()));
  }
  static std::atomic<bool> has_told{false};
  tell_once(has_told, "create_graph",
            "gradients are averaged, the gradients of gradients stay each rank's own");
}

void Reducer::tell_once(std::atomic<bool>& has_told, const char* event, const char* what) const {
  if (group_->rank() != 0 || has_told.exchange(true)) return;
  log(LogLevel::Warn, event, {{"group", group_->name()}, {"what", what}});
}

void Reducer::count_gradient(std::size_t index) {
  if (pass_.stage == Stage::Reopened) queue_finish(PassEnd::MaybeNested);
  if (is_learning_) pass_.fired_order.push_back(index);
  const std::uint32_t num_fired = ++pass_.num_fired[index];
  if (sparse_.contains(index)) return;
  const std::size_t bucket = buckets_->bucket_of(index);
  if (num_fired > num_expected_[index]) {
    // Until the bucket is sent, a further share of a gradient does no harm.
    if (bucket < pass_.next_bucket) refuse_second_gradient(index);
  } else if (num_fired == num_expected_[index]) {
    if (pass_.buckets[bucket].num_missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      timeline_.ready(bucket);
      launch_complete_buckets();
    }
  }
}

void Reducer::begin_pass(PassEnd end) {
  pass_.told = Told::Nothing;
  timeline_.begin_pass(++pass_number_);
  queue_finish(end);
}

/// Autograd drops the callbacks of a pass that fails without a call: that is how its failure shows.
class Reducer::PassGuard {
 public:
  explicit PassGuard(Reducer& reducer)
      : reducer_(reducer.weak_from_this()), number_(reducer.pass_number_) {
    for (const GradientSlot& slot : reducer.slots_) parameters_.add(slot.user());
  }
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;
  ~PassGuard() {
    const auto self = is_over_ ? nullptr : reducer_.lock();
    if (!self || self->pass_number_ != number_) return;
    self->break_pass("in backward: an exception ended it (its own output has the text)",
                     Told::Error);
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
  ParameterPass parameters_;
  bool is_over_ = false;
};

void Reducer::queue_finish(PassEnd end) {
  pass_.stage = Stage::Running;
  call_after_backward([weak = weak_from_this(), end, guard = std::make_shared<PassGuard>(*this)] {
    guard->end();
    if (const auto self = weak.lock()) self->guarded([&] { self->on_pass_end(end); });
  });
}

// Also before the pass has reached the model's outputs: the others are in theirs by now.
bool Reducer::backward_failed(const std::string& what) noexcept {
  const bool is_known = pass_.stage != Stage::None || std::exchange(is_refused_, false);
  if (pass_.stage == Stage::None || pass_.told == Told::Explained) return is_known;
  pass_.told = Told::Explained;
  group_->report_error("in backward: " + hook_failure() + what);
  return is_known;
}

std::string Reducer::hook_failure() const { return hook_ ? hook_->failure() : std::string(); }

void Reducer::break_pass(const std::string& what, Told told) noexcept {
  if (!pass_.is_running()) return;
  group_->report_error(what);
  pass_.told = std::max(pass_.told, told);
  pass_.stage = Stage::Broken;
}

void Reducer::launch_complete_buckets() {
  const std::lock_guard<std::mutex> lock(launch_mutex_);
  // The last one is left to the end of the pass, which waits for it anyway: an inline call there
  // spares the hand-over to another thread.
  while (pass_.next_bucket + 1 < buckets_->size() &&
         pass_.buckets[pass_.next_bucket].num_missing.load() == 0) {
    launch(pass_.next_bucket++, true);
  }
}

void Reducer::launch(std::size_t bucket, bool async) {
  fill(bucket);
  if (checks_gradients_) refuse_non_finite(bucket);
  timeline_.launched(bucket);
  if (options_.skip_unused_buckets && can_skip(bucket)) return timeline_.done(bucket);
  if (hook_) return hook_->start(*buckets_, bucket, parameters_);
  if (is_alone_) return timeline_.done(bucket);
  CallOptions call{.async = async, .timeout = {}, .label = buckets_->label(bucket)};
  pass_.buckets[bucket].work =
      scatters_averages()
          ? average_block(bucket, std::move(call))
          : group_->all_reduce(buckets_->flat(bucket),
                               {.op = ReduceOp::Avg, .scale = gradient_scale_}, std::move(call));
  if (!async) timeline_.done(bucket);
}

// What no gradient has come for, and the flags.
void Reducer::fill(std::size_t bucket) {
  if (pass_.is_empty) {
    buckets_->flat(bucket).zero_();
    return;
  }
  bool is_missing = false;
  const std::vector<std::size_t>& members = buckets_->members(bucket);
  for (std::size_t member = 0; member < members.size(); ++member) {
    const std::size_t index = members[member];
    const bool used = is_used(index);
    if (pass_.num_fired[index] == 0) fill_without_gradient(index);
    if (tolerates_unused()) buckets_->set_used(bucket, member, used);
    is_missing |= !used;
  }
  buckets_->set_missing(bucket, is_missing);
}

void Reducer::fill_without_gradient(std::size_t index) {
  const bool is_copy = slots_[index].is_apart() && has_own(index);
  slots_[index].fill_without_gradient();
  if (is_copy) gradient_states_[index] = GradientState::Copied;
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
      where(), what));
}

void Reducer::refuse_second_gradient(std::size_t index) const {
  const std::string& name = slots_[index].name();
  if (num_expected_[index] == 0) {
    throw StateError(fmt::format(
        "{}: parameter '{}' got a gradient after its bucket had been sent; it had none in the "
        "first pass, and static_graph=True promises the same graph each time. Hint: pass "
        "find_unused_parameters=True instead.",
        where(), name));
  }
  throw StateError(
      fmt::format("{}: parameter '{}' got a second gradient in one backward pass after its "
                  "bucket had been sent. Hint: pass static_graph=True, or use "
                  "checkpoint(..., use_reentrant=False) for layers that share weights.",
                  where(), name));
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
    break_pass("in backward: " + hook_failure() + first_line_of(std::current_exception()),
               Told::Error);
    // A hook may throw anything of the language that it is written in.
    if (hook_ && options_.rethrow) options_.rethrow(std::current_exception());
    throw;
  }
}

}  // namespace libddp
