#include "libddp/ddp/torch_bucket_plan.h"

#include <limits>
#include <vector>

#include "tests/support/catch.h"

namespace libddp {
namespace {

using Sizes = std::vector<ParameterSize>;

constexpr std::size_t kWhole = std::numeric_limits<std::size_t>::max();

Sizes floats(std::initializer_list<std::size_t> bytes) {
  Sizes sizes;
  for (const std::size_t b : bytes) sizes.push_back({b, at::kFloat});
  return sizes;
}

TEST_CASE("a bucket of torch's is full with what reaches its limit", "[torch_bucket_plan]") {
  CHECK(torch_plan(floats({4, 5, 6, 20, 1}), {0, 1, 2, 3, 4}, {10, 20}) ==
        BucketPlan{{0, 1, 2}, {3}, {4}});
  CHECK(torch_plan(floats({10, 10}), {1, 0}, {10, 100}) == BucketPlan{{1}, {0}});
  CHECK(torch_plan({}, {}, {10}).empty());
}

TEST_CASE("what is left of the dtype that came first is torch's last bucket",
          "[torch_bucket_plan]") {
  const Sizes sizes = {{4, at::kFloat}, {4, at::kHalf}, {4, at::kDouble}, {4, at::kFloat}};
  CHECK(torch_plan(sizes, {0, 1, 2, 3}, {100}) == BucketPlan{{2}, {1}, {0, 3}});
  // One that is full comes before all that is left, and its dtype keeps its place.
  CHECK(torch_plan(sizes, {0, 1, 2, 3}, {4, 100}) == BucketPlan{{0}, {1}, {2}, {3}});
}

TEST_CASE("torch's first buckets are in the order of the parameters", "[torch_bucket_plan]") {
  CHECK(first_torch_plan(floats({4, 5, 6}), {0, 1, 2}, {kWhole}) == BucketPlan{{0, 1, 2}});
  CHECK(first_torch_plan(floats({4, 6, 6, 1}), {0, 1, 2, 3}, {10, 20}) ==
        BucketPlan{{2, 3}, {0, 1}});
  CHECK(first_torch_plan(floats({4, 6, 6}), {0, 2}, {kWhole}) == BucketPlan{{0, 2}});
}

TEST_CASE("limits of torch's buckets", "[torch_bucket_plan]") {
  CHECK(torch_limits({.cap_bytes = 30, .hook_first_bytes = 10}) ==
        std::vector<std::size_t>{10, 30});
  CHECK(torch_limits({.cap_bytes = 3, .hook_first_bytes = 10}) == std::vector<std::size_t>{3, 3});
  CHECK(torch_limits({.each_bytes = {1, 2, 3}}) == std::vector<std::size_t>{1, 2, 3});
}

}  // namespace
}  // namespace libddp
