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

/// Cuts the parameters of one dtype, given as ascending positions in `order`, into buckets.
void cut(const std::vector<ParameterSize>& parameters, const std::vector<std::size_t>& order,
         const std::vector<std::size_t>& positions, const BucketLimits& limits,
         std::vector<Candidate>& out) {
  const std::size_t tail = tail_begin(parameters, order, positions, limits.last_bytes);
  const std::size_t first = out.size();
  std::size_t bytes = 0;
  for (std::size_t k = 0; k < positions.size(); ++k) {
    const std::size_t index = order[positions[k]];
    const bool in_first = out.size() == first + 1;
    const std::size_t limit =
        std::min(limits.cap_bytes, in_first ? limits.first_bytes : limits.cap_bytes);
    // The tail is cut off only where it does not fit into a first bucket that is small anyway.
    const bool full = bytes + parameters[index].bytes > limit;
    const bool at_tail = k == tail && !in_first;
    if (out.size() == first || full || at_tail) {
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
