#include "libddp/snapshot/job_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/process.h"

namespace libddp {
namespace {

enum Kind : std::int64_t { kFine, kOther, kSnapshot, kArgument };

/// Abstract sockets, by which a keeper is found, are those of a network namespace.
std::string host_key() { return machine_id() + '/' + network_namespace(); }

}  // namespace

JobRanks::JobRanks(Group group)
    : group_(std::move(group)),
      rank_(group_ ? group_->rank() : 0),
      size_(group_ ? group_->size() : 1),
      hosts_(HostLayout::from_keys(std::vector<std::string>(static_cast<std::size_t>(size_)))) {
  hosts_ = HostLayout::from_keys(gather(host_key()));
}

std::vector<std::vector<std::int64_t>> JobRanks::gather_numbers(
    const std::vector<std::int64_t>& numbers) const {
  if (size_ == 1) return {numbers};
  const auto count = static_cast<std::int64_t>(numbers.size());
  const at::Tensor own = at::empty({count}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), own.mutable_data_ptr<std::int64_t>());
  const at::Tensor all = at::empty({size_, count}, at::kLong);
  group_->all_gather_into(all, own, {.label = "snapshot"});
  std::vector<std::vector<std::int64_t>> by_rank;
  const auto* data = all.const_data_ptr<std::int64_t>();
  for (int rank = 0; rank < size_; ++rank, data += count) by_rank.emplace_back(data, data + count);
  return by_rank;
}

std::vector<std::string> JobRanks::gather(const std::string& text) const {
  if (size_ == 1) return {text};
  const auto sizes = gather_numbers({static_cast<std::int64_t>(text.size())});
  std::int64_t longest = 1;
  for (const auto& size : sizes) longest = std::max(longest, size[0]);
  const at::Tensor own = at::zeros({longest}, at::kByte);
  if (!text.empty()) std::memcpy(own.mutable_data_ptr<std::uint8_t>(), text.data(), text.size());
  const at::Tensor all = at::empty({size_, longest}, at::kByte);
  group_->all_gather_into(all, own, {.label = "snapshot"});
  std::vector<std::string> by_rank;
  const auto* data = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  for (const auto& size : sizes) {
    by_rank.emplace_back(data, static_cast<std::size_t>(size[0]));
    data += longest;
  }
  return by_rank;
}

void JobRanks::together(const std::string& what, const std::function<void()>& work) const {
  Kind kind = kFine;
  std::string text;
  std::exception_ptr own;
  try {
    work();
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = error.what();
    kind = dynamic_cast<const ArgumentError*>(&error)   ? kArgument
           : dynamic_cast<const SnapshotError*>(&error) ? kSnapshot
                                                        : kOther;
  }
  const auto kinds = gather_numbers({kind});
  const auto worst = std::max_element(kinds.begin(), kinds.end());
  if ((*worst)[0] == kFine) return;
  const auto texts = gather(text);
  if (own && kind == (*worst)[0]) std::rethrow_exception(own);
  const auto culprit = static_cast<std::size_t>(worst - kinds.begin());
  const std::string told =
      fmt::format("libddp snapshot: rank {} could not {}: {}", culprit, what, texts[culprit]);
  if ((*worst)[0] == kArgument) throw ArgumentError(told);
  if ((*worst)[0] == kSnapshot) throw SnapshotError(told);
  throw StateError(told);
}

void check_same_step(const std::vector<std::vector<std::int64_t>>& numbers) {
  for (std::size_t rank = 1; rank < numbers.size(); ++rank) {
    if (numbers[rank][0] == numbers[0][0]) continue;
    throw ArgumentError(fmt::format(
        "libddp snapshot: rank 0 saves step {}, rank {} step {}. Hint: all ranks save the same "
        "step.",
        numbers[0][0], rank, numbers[rank][0]));
  }
}

}  // namespace libddp
