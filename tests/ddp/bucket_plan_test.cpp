#include "libddp/ddp/bucket_plan.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/support/catch.h"

namespace libddp {
namespace {

std::vector<ParameterSize> floats(std::initializer_list<std::size_t> bytes) {
  std::vector<ParameterSize> sizes;
  for (const std::size_t b : bytes) sizes.push_back({b, at::kFloat});
  return sizes;
}

BucketPlan in_given_order(const std::vector<ParameterSize>& sizes, const BucketLimits& limits) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  return plan_buckets(sizes, order, limits);
}

TEST_CASE("gradients come in reverse order as long as nothing better is known", "[bucket_plan]") {
  CHECK(reverse_order(3) == std::vector<std::size_t>{2, 1, 0});
  CHECK(reverse_order(0).empty());
}

TEST_CASE("a small model is one bucket", "[bucket_plan]") {
  CHECK(plan_buckets(floats({100, 100}), reverse_order(2), {}) == BucketPlan{{1, 0}});
  CHECK(plan_buckets({}, {}, {}).empty());
}

TEST_CASE("the first and the last bucket are small, the middle keeps the cap", "[bucket_plan]") {
  const BucketLimits limits{.first_bytes = 10, .cap_bytes = 30, .last_bytes = 10};
  const BucketPlan plan = in_given_order(floats({5, 5, 10, 10, 10, 15, 4, 3}), limits);
  CHECK(plan == BucketPlan{{0, 1}, {2, 3, 4}, {5}, {6, 7}});
}

TEST_CASE("a parameter larger than every limit stands alone", "[bucket_plan]") {
  const BucketLimits limits{.first_bytes = 10, .cap_bytes = 30, .last_bytes = 10};
  CHECK(in_given_order(floats({100, 5, 100, 5, 100}), limits) ==
        BucketPlan{{0}, {1}, {2}, {3}, {4}});
}

TEST_CASE("the first bucket is no larger than the cap", "[bucket_plan]") {
  const BucketLimits limits{.first_bytes = 100, .cap_bytes = 10, .last_bytes = 1};
  CHECK(in_given_order(floats({6, 6, 6}), limits) == BucketPlan{{0}, {1}, {2}});
}

TEST_CASE("each bucket has a limit of its own where limits are listed", "[bucket_plan]") {
  BucketLimits limits;
  limits.each_bytes = {10, 30, 20};
  CHECK(in_given_order(floats({5, 5, 10, 10, 10, 15, 5, 20, 1}), limits) ==
        BucketPlan{{0, 1}, {2, 3, 4}, {5, 6}, {7}, {8}});
  const std::vector<ParameterSize> sizes = {
      {8, at::kFloat}, {8, at::kHalf}, {8, at::kFloat}, {8, at::kHalf}};
  limits.each_bytes = {8, 16};
  CHECK(in_given_order(sizes, limits) == BucketPlan{{0}, {1}, {2}, {3}});
}

TEST_CASE("dtypes do not mix; buckets stand in the order of their last gradient", "[bucket_plan]") {
  const std::vector<ParameterSize> sizes = {
      {4, at::kFloat}, {2, at::kHalf}, {4, at::kFloat}, {2, at::kHalf}, {4, at::kFloat}};
  CHECK(in_given_order(sizes, {}) == BucketPlan{{1, 3}, {0, 2, 4}});
}

TEST_CASE("every plan keeps its promises", "[bucket_plan]") {
  std::mt19937 random(7);
  const BucketLimits limits{.first_bytes = 50, .cap_bytes = 200, .last_bytes = 50};
  for (int round = 0; round < 200; ++round) {
    std::vector<ParameterSize> sizes(random() % 40 + 1);
    for (ParameterSize& size : sizes) {
      size = {random() % 120, random() % 4 == 0 ? at::kHalf : at::kFloat};
    }
    std::vector<std::size_t> order = reverse_order(sizes.size());
    std::shuffle(order.begin(), order.end(), random);
    const BucketPlan plan = plan_buckets(sizes, order, limits);

    std::vector<std::size_t> seen;
    std::size_t previous_last = 0;
    for (const auto& bucket : plan) {
      REQUIRE_FALSE(bucket.empty());
      std::size_t bytes = 0;
      std::vector<std::size_t> positions;
      for (const std::size_t index : bucket) {
        seen.push_back(index);
        bytes += sizes[index].bytes;
        REQUIRE(sizes[index].dtype == sizes[bucket.front()].dtype);
        positions.push_back(std::find(order.begin(), order.end(), index) - order.begin());
      }
      REQUIRE(std::is_sorted(positions.begin(), positions.end()));
      REQUIRE((bucket.size() == 1 || bytes <= limits.cap_bytes));
      REQUIRE(positions.back() >= previous_last);
      previous_last = positions.back();
    }
    std::sort(seen.begin(), seen.end());
    std::sort(order.begin(), order.end());
    REQUIRE(seen == order);
  }
}

}  // namespace
}  // namespace libddp
