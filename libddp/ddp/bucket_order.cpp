#include "libddp/ddp/bucket_order.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/ddp/torch_bucket_plan.h"

namespace libddp {

BucketOrder::BucketOrder(std::vector<ParameterSize> sizes, BucketLimits limits,
                         std::vector<std::size_t> without_bucket)
    : sizes_(std::move(sizes)),
      limits_(limits),
      without_bucket_(std::move(without_bucket)),
      num_expected_(sizes_.size(), 1) {}

BucketPlan BucketOrder::first_plan() const {
  std::vector<std::size_t> order = with_bucket(reverse_order(sizes_.size()));
  if (!is_torchs_) return plan_of(order);
  std::reverse(order.begin(), order.end());
  const bool is_whole = begins_whole_ && limits_.each_bytes.empty();
  return first_torch_plan(
      sizes_, order,
      is_whole ? std::vector{std::numeric_limits<std::size_t>::max()} : torch_limits(limits_));
}

BucketPlan BucketOrder::plan_of(const std::vector<std::size_t>& order) const {
  return is_torchs_ ? torch_plan(sizes_, order, torch_limits(limits_))
                    : plan_buckets(sizes_, order, limits_);
}

std::vector<std::size_t> BucketOrder::with_bucket(std::vector<std::size_t> order) const {
  std::erase_if(order, [&](std::size_t index) {
    return std::find(without_bucket_.begin(), without_bucket_.end(), index) !=
           without_bucket_.end();
  });
  return order;
}

void BucketOrder::learn(ProcessGroup& group, const BucketPlan& present) {
  is_learning_ = false;
  BucketPlan plan = plan_of(with_bucket(agreed_order(group)));
  if (plan != present) planned_ = std::move(plan);
}

std::vector<std::size_t> BucketOrder::agreed_order(ProcessGroup& group) {
  std::vector<std::size_t> order;
  std::vector<std::uint8_t> seen(sizes_.size(), 0);
  const auto append = [&](std::size_t index) {
    if (!std::exchange(seen[index], std::uint8_t{1})) order.push_back(index);
  };
  for (const std::size_t index : fired_) append(index);
  fired_ = {};
  // What did not fire comes last: no bucket waits for it before the end of a pass.
  for (const std::size_t index : reverse_order(sizes_.size())) append(index);

  if (group.size() == 1 || order.empty()) return order;
  at::Tensor shared = at::empty({static_cast<std::int64_t>(order.size())}, at::kLong);
  auto* const data = shared.mutable_data_ptr<std::int64_t>();
  std::copy(order.begin(), order.end(), data);
  group.broadcast(shared, 0, {.async = false, .timeout = {}, .label = "order of gradients"});
  std::copy(data, data + order.size(), order.begin());
  return order;
}

BucketPlan BucketOrder::take_plan() { return *std::exchange(planned_, std::nullopt); }

void BucketOrder::restart(std::vector<ParameterSize> sizes) {
  sizes_ = std::move(sizes);
  is_learning_ = true;
  is_kept_ = false;
  planned_ = std::nullopt;
}

void BucketOrder::refuse_second_gradient(std::size_t index, const std::string& where,
                                         const std::string& name) const {
  if (num_expected_[index] == 0) {
    throw StateError(fmt::format(
        "{}: parameter '{}' got a gradient after its bucket had been sent; it had none in the "
        "first pass, and static_graph=True promises the same graph each time. Hint: pass "
        "find_unused_parameters=True instead.",
        where, name));
  }
  throw StateError(
      fmt::format("{}: parameter '{}' got a second gradient in one backward pass after its "
                  "bucket had been sent. Hint: pass static_graph=True, or use "
                  "checkpoint(..., use_reentrant=False) for layers that share weights.",
                  where, name));
}

void BucketOrder::expect_unknown() {
  num_expected_.assign(num_expected_.size(), std::numeric_limits<std::uint32_t>::max());
}

}  // namespace libddp
