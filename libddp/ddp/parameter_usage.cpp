#include "libddp/ddp/parameter_usage.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"

namespace libddp {
namespace {

/// More names than this would hide the message.
constexpr std::size_t kMaxNames = 20;

/// [world_size * parameters], rank by rank.
at::Tensor gather_usage(ProcessGroup& group, const std::vector<std::uint8_t>& unused) {
  const auto n = static_cast<std::int64_t>(unused.size());
  at::Tensor mine = at::empty({n}, at::kByte);
  std::memcpy(mine.data_ptr(), unused.data(), unused.size());
  at::Tensor all = at::empty({n * group.size()}, at::kByte);
  group.all_gather_into(all, mine, {.async = false, .timeout = {}, .label = "unused parameters"});
  return all;
}

std::string ranks_of(const std::vector<int>& ranks, int world_size) {
  if (static_cast<int>(ranks.size()) == world_size) {
    return world_size == 1 ? "" : " (all ranks)";
  }
  return fmt::format(" ({} {})", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

ParameterUsage::ParameterUsage(Group group, const BackwardPass& pass, GradientSlots& slots,
                               bool tolerates_unused)
    : group_(std::move(group)), pass_(pass), slots_(slots), tolerates_unused_(tolerates_unused) {}

bool ParameterUsage::is_any_used(const std::vector<std::size_t>& parameters) const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [this](std::size_t index) { return is_used(index); });
}

std::vector<SparseGradients::Share> ParameterUsage::shares_of(
    const std::vector<std::size_t>& parameters) const {
  using Share = SparseGradients::Share;
  std::vector<Share> shares;
  for (const std::size_t index : parameters) {
    shares.push_back(pass_.is_empty() ? Share::Absent
                                      : (is_used(index) ? Share::Used : Share::Missing));
  }
  return shares;
}

void ParameterUsage::fill(GradientBuckets& buckets, std::size_t bucket) {
  if (pass_.is_empty()) {
    buckets.flat(bucket).zero_();
    return;
  }
  bool is_missing = false;
  const std::vector<std::size_t>& members = buckets.members(bucket);
  for (std::size_t member = 0; member < members.size(); ++member) {
    const std::size_t index = members[member];
    const bool used = is_used(index);
    if (pass_.num_fired(index) == 0) slots_.fill_without_gradient(index);
    if (tolerates_unused_) buckets.set_used(bucket, member, used);
    is_missing |= !used;
  }
  buckets.set_missing(bucket, is_missing);
}

void ParameterUsage::install_gradients_of_others(const GradientBuckets& buckets) {
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    const std::vector<std::size_t>& members = buckets.members(bucket);
    for (std::size_t member = 0; member < members.size(); ++member) {
      // A parameter that no rank used keeps its `.grad` as it was, None included.
      if (!is_used(members[member]) && buckets.is_used(bucket, member)) {
        slots_[members[member]].install();
      }
    }
  }
}

void ParameterUsage::refuse_unused() {
  std::vector<std::uint8_t> unused;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    unused.push_back(is_used(index) || pass_.is_empty() ? 0 : 1);
  }
  slots_.settle();
  throw StateError(describe_unused(unused));
}

std::string ParameterUsage::describe_unused(const std::vector<std::uint8_t>& unused) const {
  const at::Tensor usage = gather_usage(*group_, unused);
  const auto* const flags = usage.const_data_ptr<std::uint8_t>();
  std::vector<std::string> found;
  std::size_t num_unused = 0;
  for (std::size_t index = 0; index < unused.size(); ++index) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group_->size(); ++rank) {
      if (flags[static_cast<std::size_t>(rank) * unused.size() + index] != 0) ranks.push_back(rank);
    }
    if (ranks.empty() || ++num_unused > kMaxNames) continue;
    found.push_back(fmt::format("'{}'{}", slots_[index].name(), ranks_of(ranks, group_->size())));
  }
  if (num_unused > kMaxNames) found.push_back(fmt::format("{} more", num_unused - kMaxNames));
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  return fmt::format(
      "{} backward: {} of {} parameters got no gradient: {}. Hint: they did not take part in the "
      "loss, or were frozen or replaced after wrapping; pass find_unused_parameters=True if that "
      "is intended.",
      me.where(), num_unused, unused.size(), fmt::join(found, ", "));
}

}  // namespace libddp
