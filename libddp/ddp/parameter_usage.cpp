#include "libddp/ddp/parameter_usage.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"

namespace libddp {
namespace {

/// More names than this would hide the message.
constexpr std::size_t kMaxNames = 20;

bool is_any(const std::vector<std::uint8_t>& flags) {
  return std::find(flags.begin(), flags.end(), 1) != flags.end();
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
    : group_(std::move(group)),
      pass_(pass),
      slots_(slots),
      tolerates_unused_(tolerates_unused),
      missing_(group_) {}

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

void ParameterUsage::fill(GradientBuckets& buckets, std::size_t bucket, bool is_read) {
  if (pass_.is_empty()) {
    buckets.flat(bucket).zero_();
    return;
  }
  bool is_missing = false;
  const std::vector<std::size_t>& members = buckets.members(bucket);
  if (is_read || !slots_.may_leave_buckets()) slots_.collect(members, pass_.num_fired());
  for (std::size_t member = 0; member < members.size(); ++member) {
    const bool used = is_used(members[member]);
    if (tolerates_unused_) buckets.set_used(bucket, member, used);
    is_missing |= !used;
  }
  buckets.set_missing(bucket, is_missing);
}

bool ParameterUsage::share(GradientBuckets& buckets, bool at_once) {
  if (tolerates_unused_ || buckets.has_tails()) {
    share_flags(*group_, buckets);
    return is_any_missing(buckets);
  }
  const bool lacks_any = is_any_missing(buckets);
  if (group_->size() == 1 || buckets.size() == 0) return lacks_any;
  missing_.tell(unused_here());
  if (!lacks_any && !at_once) return false;
  std::vector<std::uint8_t> of_all = missing_.hear();
  const bool is_any_there = is_any(of_all);
  if (is_any_there) heard_ = std::move(of_all);
  return is_any_there;
}

void ParameterUsage::check_shared() {
  if (!missing_.is_told()) return;
  const std::vector<std::uint8_t> of_all = missing_.hear();
  if (is_any(of_all)) throw StateError(describe_unused(of_all));
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
  const std::vector<std::uint8_t> unused = unused_here();
  slots_.settle();
  if (heard_.empty()) {
    if (!missing_.is_told()) missing_.tell(unused);
    heard_ = missing_.hear();
  }
  throw StateError(describe_unused(std::exchange(heard_, {})));
}

std::vector<std::uint8_t> ParameterUsage::unused_here() const {
  std::vector<std::uint8_t> unused;
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    unused.push_back(is_used(index) || pass_.is_empty() ? 0 : 1);
  }
  return unused;
}

std::string ParameterUsage::describe_unused(const std::vector<std::uint8_t>& of_all) const {
  const std::size_t num_parameters = slots_.size();
  std::vector<std::string> found;
  std::size_t num_unused = 0;
  for (std::size_t index = 0; index < num_parameters; ++index) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group_->size(); ++rank) {
      if (of_all[static_cast<std::size_t>(rank) * num_parameters + index] != 0) {
        ranks.push_back(rank);
      }
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
      me.where(), num_unused, num_parameters, fmt::join(found, ", "));
}

bool is_any_missing(const GradientBuckets& buckets) {
  bool is_missing = false;
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    is_missing |= buckets.is_missing(bucket);
  }
  return is_missing;
}

}  // namespace libddp
