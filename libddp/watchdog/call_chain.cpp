#include "libddp/watchdog/call_chain.h"

#include <algorithm>
#include <cstdlib>

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

std::optional<LastCalls> CallChain::news() {
  const std::lock_guard lock(mutex_);
  if (is_over_ || told_ == sequence_) return std::nullopt;
  LastCalls calls;
  std::size_t count = 0;
  for (const auto& [description, number] : last_) {
    if (number <= told_) continue;
    if (++count > kTold) break;
    calls.sequence = number;
    if (!calls.text.empty()) calls.text += kCallSeparator;
    calls.text += description.to_string(number);
  }
  calls.chain = chain_[calls.sequence % kKept];
  told_ = calls.sequence;
  return calls;
}

void CallChain::hear(int rank, LastCalls calls) {
  const std::lock_guard lock(mutex_);
  if (is_over_) return;
  Heard& heard = heard_[rank];
  heard.by_number.merge(calls_by_number(calls.text));
  while (heard.by_number.size() > kNamed) heard.by_number.erase(heard.by_number.begin());
  heard.calls = std::move(calls);
}

std::optional<CallChain::Difference> CallChain::compare() {
  const std::lock_guard lock(mutex_);
  for (auto& [rank, heard] : heard_) {
    if (!heard.calls || heard.calls->sequence > sequence_) continue;
    const auto difference = difference_with(rank, heard);
    heard.calls.reset();
    if (difference) return difference;
  }
  return std::nullopt;
}

std::optional<CallChain::Difference> CallChain::difference_with(int rank,
                                                                const Heard& heard) const {
  const std::uint64_t sequence = heard.calls->sequence;
  const bool is_kept = sequence + kKept > sequence_;
  if (!is_kept || chain_[sequence % kKept] == heard.calls->chain) return std::nullopt;
  Difference difference{.rank = rank, .sequence = sequence, .own = "", .theirs = ""};
  for (const auto& [description, number] : last_) {
    const auto theirs = heard.by_number.find(number);
    if (theirs == heard.by_number.end()) continue;
    const std::string own = description.to_string(number);
    if (own == theirs->second) continue;
    difference.own = own;
    difference.theirs = theirs->second;
    break;
  }
  return difference;
}

void CallChain::end() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  heard_.clear();
}

}  // namespace libddp
