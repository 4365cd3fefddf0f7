#include "libddp/ddp/reducer_pass.h"

#include <algorithm>

namespace libddp {

void ReducerPass::restart(Stage first, const GradientBuckets& of,
                          const std::vector<std::uint32_t>& num_expected) {
  stage = first;
  told = Told::Nothing;
  is_empty = false;
  next_bucket = 0;
  std::fill(num_fired.begin(), num_fired.end(), 0);
  fired_order.clear();
  if (num_buckets != of.size()) {
    num_buckets = of.size();
    buckets = std::make_unique<Bucket[]>(num_buckets);
  }
  for (std::size_t bucket = 0; bucket < num_buckets; ++bucket) {
    const auto& members = of.members(bucket);
    const auto num_missing = std::count_if(
        members.begin(), members.end(), [&](std::size_t index) { return num_expected[index] > 0; });
    buckets[bucket].num_missing.store(static_cast<int>(num_missing));
    buckets[bucket].work = nullptr;
  }
}

}  // namespace libddp
