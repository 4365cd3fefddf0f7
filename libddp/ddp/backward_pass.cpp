#include "libddp/ddp/backward_pass.h"

#include <fmt/format.h>

#include <algorithm>

#include "libddp/base/error.h"

namespace libddp {

void BackwardPass::restart(Stage first, const GradientBuckets& of,
                           const std::vector<std::uint32_t>& num_expected) {
  stage_ = first;
  told_ = Told::Nothing;
  is_empty_ = false;
  num_sent_ = 0;
  std::fill(num_fired_.begin(), num_fired_.end(), 0);
  if (num_buckets_ != of.size()) {
    num_buckets_ = of.size();
    num_missing_ = std::make_unique<std::atomic<int>[]>(num_buckets_);
  }
  for (std::size_t bucket = 0; bucket < num_buckets_; ++bucket) {
    const auto& members = of.members(bucket);
    const auto num_missing = std::count_if(
        members.begin(), members.end(), [&](std::size_t index) { return num_expected[index] > 0; });
    num_missing_[bucket].store(static_cast<int>(num_missing));
  }
}

bool BackwardPass::are_all_ready() const {
  for (std::size_t bucket = 0; bucket < num_buckets_; ++bucket) {
    if (!is_ready(bucket)) return false;
  }
  return true;
}

void BackwardPass::check_not_ended_early(const std::string& where) const {
  if (stage_ == Stage::Reopened) {
    throw StateError(fmt::format(
        "{}: the last backward pass ended inside another one before all gradients were there, so "
        "nothing was averaged. Hint: return tensors from forward() directly or in tuples, lists, "
        "dicts or dataclasses, or use checkpoint(..., use_reentrant=False).",
        where));
  }
  if (num_sent_ == 0) return;
  throw StateError(fmt::format(
      "{}: the last backward pass ended early, after {} of {} buckets had been sent, so the "
      "gradients of the ranks differ. Hint: look for the exception that it raised; a job that "
      "wants to go on restarts from a checkpoint.",
      where, num_sent_, num_buckets_));
}

}  // namespace libddp
