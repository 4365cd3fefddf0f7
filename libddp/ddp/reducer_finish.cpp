// The end of a pass: sends the rest, waits, tells what is unused, learns. See reducer.h.

#include <fmt/format.h>

#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/ddp/parameter_usage.h"
#include "libddp/ddp/reducer.h"

namespace libddp {

void Reducer::on_pass_end(PassEnd end) {
  if (!pass_.is_running()) return;
  if (end == PassEnd::MaybeNested && is_nested_backward() && !is_complete()) {
    // The outer pass goes on; its next gradient queues the end again.
    pass_.stage = Stage::Reopened;
    return;
  }
  if (is_manual_) return send_rest(true);
  finish_pass();
}

void Reducer::run_empty_pass() {
  check_last_pass();
  rebuild_if_planned();
  restart_pass(Stage::Running);
  pass_.is_empty = true;
  timeline_.begin_pass(++pass_number_);
  finish_pass();
}

bool Reducer::is_complete() const {
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    if (pass_.buckets[bucket].num_missing.load() != 0) return false;
  }
  for (const std::size_t index : sparse_.indices()) {
    if (pass_.num_fired[index] < num_expected_[index]) return false;
  }
  return true;
}

void Reducer::finish_pass() {
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
  const bool is_sent = pass_.next_bucket == buckets_->size() && pass_.next_bucket > 0;
  if (is_sent) return;  // by hand, before
  timeline_.end_backward();
  const std::lock_guard<std::mutex> lock(launch_mutex_);
  while (pass_.next_bucket < buckets_->size()) {
    const bool is_last = pass_.next_bucket + 1 == buckets_->size();
    launch(pass_.next_bucket++, last_is_async || !is_last);
  }
}

void Reducer::take_averages() {
  bool is_missing = collect_results();
  is_missing |= average_sparse_gradients();
  timeline_.end_pass();
  watch_slow_ranks();
  // From here on all ranks know the same.
  pass_.stage = Stage::None;
  if (is_missing && !tolerates_unused()) refuse_unused();
  if (is_missing && !pass_.is_empty) install_gradients_of_others();
  bring_back_copies();
  if (is_learning_) learn();
  settle();
  if (scatters_averages_) mark_averages();
}

// The lowest of the ranks that wait speaks for all: what they wait for is the same.
void Reducer::watch_slow_ranks() {
  group_->waits(waited_ns_);
  const std::int64_t exposed = timeline_.last_exposed_ns() + std::exchange(exposed_before_ns_, 0);
  const auto slow = slow_ranks_.end_pass(timeline_.last_end_ns(), exposed, waited_ns_);
  if (!slow || group_->rank() != (slow->rank == 0 ? 1 : 0)) return;
  log(LogLevel::Warn, "slow_rank",
      {{"group", group_->name()},
       {"slow_rank", slow->rank},
       {"others_waited", fmt::format("{:.0f}%", 100.0 * slow->share)},
       {"steps", SlowRankWatch::kNumPasses}});
}

// Whether some rank has no gradient for some parameter.
bool Reducer::collect_results() {
  if (hook_) hook_->finish(*buckets_);
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    if (const WorkPtr work = std::exchange(pass_.buckets[bucket].work, nullptr)) {
      work->wait();
      if (work->finished_ns() != 0) timeline_.done(bucket, work->finished_ns());
    }
  }
  if (scatters_averages()) share_flags();
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
    shares.push_back(pass_.is_empty ? Share::Absent
                                    : (is_used(index) ? Share::Used : Share::Missing));
  }
  if (!hook_) return sparse_.average(shares, gradient_scale_);
  return sparse_.exchange(
      shares, [&](std::size_t position, const at::Tensor& own, const NamedTensor& parameter) {
        return hook_->run_alone(own, position, buckets_->size(), parameter);
      });
}

bool Reducer::is_used(std::size_t index) const {
  return pass_.num_fired[index] > 0 || has_own(index);
}

bool Reducer::has_own(std::size_t index) const {
  const GradientState state = gradient_states_[index];
  const bool is_own = state == GradientState::Own || state == GradientState::Copied;
  return is_own && slots_[index].has_gradient();
}

void Reducer::settle() { gradient_states_.assign(gradient_states_.size(), GradientState::Settled); }

void Reducer::refuse_unused() {
  std::vector<std::string> names;
  std::vector<std::uint8_t> unused;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    names.push_back(slots_[index].name());
    unused.push_back(is_used(index) || pass_.is_empty ? 0 : 1);
  }
  settle();
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

void Reducer::bring_back_copies() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    if (gradient_states_[index] == GradientState::Copied) slots_[index].install();
  }
}

void Reducer::learn() {
  is_learning_ = false;
  BucketPlan plan = plan_of(agreed_order());
  if (plan != buckets_->plan()) {
    planned_ = std::move(plan);
    if (has_owners_) rebuild_if_planned();  // the gradients move along
  }
  describe_layout();
  // Counts of a pass without data say nothing: buckets then wait for the end of each pass.
  if (options_.static_graph && !pass_.is_empty) num_expected_ = pass_.num_fired;
}

}  // namespace libddp
