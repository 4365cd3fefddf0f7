#include "libddp/ddp/bucket_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace libddp {
namespace {

/// A bucket, and where in the order its last gradient stands.
struct Candidate {
  std::size_t last_position = 0;
  std::vector<std::size_t> members;
};

/// Where in `positions` the small last bucket begins: as many trailing parameters as fit into
/// `last_bytes`, one at least.
std::size_t tail_begin(const std::vector<ParameterSize>& parameters,
                       const std::vector<std::size_t>& order,
                       const std::vector<std::size_t>& positions, std::size_t last_bytes) {
  std::size_t begin = positions.size() - 1;
  std::size_t bytes = parameters[order[positions[begin]]].bytes;
  while (begin > 0) {
    bytes += parameters[order[positions[begin - 1]]].bytes;
    if (bytes > last_bytes) break;
    --begin;
  }
  return begin;
}

/// How much the bucket at `position` (0 = the first of its dtype) may hold.
std::size_t limit_of(std::size_t position, const BucketLimits& limits) {
  if (!limits.each_bytes.empty()) {
    return limits.each_bytes[std::min(position, limits.each_bytes.size() - 1)];
  }
  return position == 0 ? std::min(limits.cap_bytes, limits.first_bytes) : limits.cap_bytes;
}

/// Cuts the parameters of one dtype, given as ascending positions in `order`, into buckets.
void cut(const std::vector<ParameterSize>& parameters, const std::vector<std::size_t>& order,
         const std::vector<std::size_t>& positions, const BucketLimits& limits,
         std::vector<Candidate>& out) {
  const std::size_t tail = limits.each_bytes.empty()
                               ? tail_begin(parameters, order, positions, limits.last_bytes)
                               : positions.size();
  const std::size_t first = out.size();
  std::size_t bytes = 0;
  for (std::size_t k = 0; k < positions.size(); ++k) {
    const std::size_t index = order[positions[k]];
    const std::size_t num_cut = out.size() - first;
    // The tail is cut off only where it does not fit into a first bucket that is small anyway.
    const bool at_tail = k == tail && num_cut > 1;
    if (num_cut == 0 || at_tail ||
        bytes + parameters[index].bytes > limit_of(num_cut - 1, limits)) {
      out.emplace_back();
      bytes = 0;
    }
    out.back().members.push_back(index);
    out.back().last_position = positions[k];
    bytes += parameters[index].bytes;
  }
}

}  // namespace

std::vector<std::size_t> reverse_order(std::size_t n) {
  std::vector<std::size_t> order(n);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return order;
}

BucketPlan plan_buckets(const std::vector<ParameterSize>& parameters,
                        const std::vector<std::size_t>& order, const BucketLimits& limits) {
  std::map<c10::ScalarType, std::vector<std::size_t>> positions;
  for (std::size_t position = 0; position < order.size(); ++position) {
    positions[parameters[order[position]].dtype].push_back(position);
  }
  std::vector<Candidate> candidates;
  for (const auto& [dtype, of_dtype] : positions) {
    cut(parameters, order, of_dtype, limits, candidates);
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.last_position < b.last_position;
  });
  BucketPlan plan;
  for (Candidate& candidate : candidates) plan.push_back(std::move(candidate.members));
  return plan;
}

}  // namespace libddp
