#include "libddp/ddp/torch_bucket_plan.h"

#include <algorithm>
#include <utility>

namespace libddp {
namespace {

/// The bucket of a dtype that is being filled.
struct Filling {
  c10::ScalarType dtype;
  std::size_t num_full = 0;
  std::size_t bytes = 0;
  std::vector<std::size_t> members = {};
};

Filling& filling_of(c10::ScalarType dtype, std::vector<Filling>& all) {
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Filling& each) { return each.dtype == dtype; });
  return found != all.end() ? *found : all.emplace_back(Filling{.dtype = dtype});
}

}  // namespace

std::vector<std::size_t> torch_limits(const BucketLimits& limits) {
  if (!limits.each_bytes.empty()) return limits.each_bytes;
  return {std::min(limits.hook_first_bytes, limits.cap_bytes), limits.cap_bytes};
}

BucketPlan torch_plan(const std::vector<ParameterSize>& parameters,
                      const std::vector<std::size_t>& order,
                      const std::vector<std::size_t>& limits) {
  BucketPlan plan;
  std::vector<Filling> all;
  for (const std::size_t index : order) {
    Filling& filling = filling_of(parameters[index].dtype, all);
    filling.members.push_back(index);
    filling.bytes += parameters[index].bytes;
    if (filling.bytes < limits[std::min(filling.num_full, limits.size() - 1)]) continue;
    plan.push_back(std::exchange(filling.members, {}));
    filling.bytes = 0;
    ++filling.num_full;
  }
  // As torch's table of dtypes gives them.
  for (auto each = all.rbegin(); each != all.rend(); ++each) {
    if (!each->members.empty()) plan.push_back(std::move(each->members));
  }
  return plan;
}

BucketPlan first_torch_plan(const std::vector<ParameterSize>& parameters,
                            const std::vector<std::size_t>& indices,
                            const std::vector<std::size_t>& limits) {
  BucketPlan plan = torch_plan(parameters, indices, limits);
  std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a[0] > b[0]; });
  return plan;
}

}  // namespace libddp
