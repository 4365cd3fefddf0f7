#include "libddp/watchdog/call_chain.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace libddp {

OpDescription as_all_ranks_see_it(OpDescription description) {
  description.num_dims = 0;
  std::fill(std::begin(description.label), std::end(description.label), '\0');
  // With sizes for each rank they differ; without, one rank may say so and another one not.
  if (description.kind == OpKind::AllToAll) description.count = 0;
  return description;
}

std::map<std::uint64_t, std::string> calls_by_number(const std::string& text) {
  std::map<std::uint64_t, std::string> calls;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(kCallSeparator, begin), text.size());
    const std::string call = text.substr(begin, end - begin);
    const std::size_t number = call.find(" #");
    if (number != std::string::npos) calls[std::strtoull(&call[number + 2], nullptr, 10)] = call;
    begin = end + kCallSeparator.size();
  }
  return calls;
}

void CallChain::add(const OpDescription& description, std::uint64_t sequence) {
  const OpDescription seen = as_all_ranks_see_it(description);
  const std::lock_guard lock(mutex_);
  // Odd, so that no earlier difference is multiplied away.
  const std::uint64_t before = chain_[sequence_ % kKept] * 0x9E3779B97F4A7C15ull;
  sequence_ = sequence;
  chain_[sequence % kKept] = before ^ seen.fingerprint(sequence);
  last_.emplace_back(seen, sequence);
  if (last_.size() > kNamed) last_.pop_front();
}

CallChain::Calls::const_iterator CallChain::from(std::uint64_t sequence) const {
  if (last_.empty()) return last_.end();
  const std::uint64_t first = last_.front().second;
  const std::uint64_t skipped = sequence > first ? sequence - first : 0;
  return last_.begin() + static_cast<std::ptrdiff_t>(std::min(skipped, last_.size()));
}

std::optional<LastCalls> CallChain::news() {
  const std::lock_guard lock(mutex_);
  if (is_over_ || told_ == sequence_) return std::nullopt;
  LastCalls calls;
  std::size_t count = 0;
  for (auto call = from(told_ + 1); call != last_.end() && count < kTold; ++call, ++count) {
    const auto& [description, number] = *call;
    calls.sequence = number;
    if (!calls.text.empty()) calls.text += kCallSeparator;
    calls.text += description.to_string(number);
  }
  calls.chain = chain_[calls.sequence % kKept];
  told_ = calls.sequence;
  return calls;
}

void CallChain::hear(int rank, const LastCalls& calls) {
  const std::lock_guard lock(mutex_);
  if (is_over_) return;
  auto& [links, by_number] = heard_[rank];
  // What is reached next stays: a rank that is always ahead is compared all the same.
  if (links.size() == kAhead) links.pop_back();
  links.push_back({calls.sequence, calls.chain});
  by_number.merge(calls_by_number(calls.text));
  while (by_number.size() > kAhead) by_number.erase(std::prev(by_number.end()));
}

std::optional<CallChain::Difference> CallChain::compare() {
  const std::lock_guard lock(mutex_);
  for (auto& [rank, heard] : heard_) {
    auto& [links, by_number] = heard;
    while (!links.empty() && links.front().sequence <= sequence_) {
      const Link told = links.front();
      links.pop_front();
      if (const auto difference = difference_with(rank, heard, told)) {
        is_over_ = true;
        return difference;
      }
      by_number.erase(by_number.begin(), by_number.upper_bound(told.sequence));
    }
  }
  return std::nullopt;
}

std::optional<CallChain::Difference> CallChain::difference_with(int rank, const Heard& heard,
                                                                const Link& told) const {
  const bool is_kept = told.sequence + kKept > sequence_;
  if (!is_kept || chain_[told.sequence % kKept] == told.chain) return std::nullopt;
  Difference difference{.rank = rank, .sequence = told.sequence, .own = "", .theirs = ""};
  for (const auto& [number, theirs] : heard.by_number) {
    const auto call = from(number);
    if (call == last_.end() || call->second != number) continue;
    const std::string own = call->first.to_string(number);
    if (own == theirs) continue;
    difference.own = own;
    difference.theirs = theirs;
    break;
  }
  return difference;
}

std::map<std::uint64_t, std::string> CallChain::around(std::uint64_t sequence,
                                                       std::uint64_t reach) const {
  const std::lock_guard lock(mutex_);
  std::map<std::uint64_t, std::string> calls;
  const std::uint64_t begin = sequence - std::min(sequence, reach);
  for (auto call = from(begin); call != last_.end() && call->second <= sequence + reach; ++call) {
    calls[call->second] = call->first.to_string(call->second);
  }
  return calls;
}

std::uint64_t CallChain::sequence() const {
  const std::lock_guard lock(mutex_);
  return sequence_;
}

void CallChain::end() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  heard_.clear();
  last_.clear();
}

}  // namespace libddp
