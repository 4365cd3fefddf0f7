#include "libddp/ddp/finite_check.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/sum.h>

#include "libddp/base/env.h"

namespace libddp {

bool checks_gradients() {
  const auto choice = env_choice("LIBDDP_NAN_CHECK", {"off", "raise"});
  return choice && *choice == "raise";
}

std::optional<std::size_t> first_non_finite(const GradientBuckets& buckets, std::size_t bucket) {
  // One pass over the bucket; a sum that is finite has no summand that is not.
  const at::Tensor gradients = buckets.gradients(bucket);
  if (at::isfinite(at::sum(gradients)).item<bool>()) return std::nullopt;
  for (const std::size_t index : buckets.members(bucket)) {
    if (!at::isfinite(buckets.view(index)).all().item<bool>()) return index;
  }
  return std::nullopt;  // only the sum is too large
}

}  // namespace libddp
