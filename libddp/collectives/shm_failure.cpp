// ShmCore's failures: kept, shown to the peers, taken over from them, put into words.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "libddp/base/printable.h"
#include "libddp/collectives/shm_core.h"

namespace libddp {
namespace {

struct SameCall {
  std::uint64_t fingerprint;
  std::vector<int> ranks;
};

// The ranks that have come, by what they called; the most ranks first, then by lowest rank.
std::vector<SameCall> by_call(const std::vector<Slot*>& slots, std::uint64_t barrier) {
  std::vector<SameCall> calls;
  for (std::size_t r = 0; r < slots.size(); ++r) {
    if (slots[r]->stamp.load(std::memory_order_acquire) != barrier) continue;
    const std::uint64_t fingerprint = slots[r]->fingerprint;
    auto call = std::find_if(calls.begin(), calls.end(),
                             [&](const SameCall& c) { return c.fingerprint == fingerprint; });
    if (call == calls.end()) call = calls.insert(call, SameCall{fingerprint, {}});
    call->ranks.push_back(static_cast<int>(r));
  }
  std::stable_sort(calls.begin(), calls.end(), [](const SameCall& a, const SameCall& b) {
    return a.ranks.size() > b.ranks.size();
  });
  return calls;
}

std::string ranks_text(const ShmCore& core, std::vector<int> ranks) {
  for (int& rank : ranks) rank = core.group_rank(rank);
  return fmt::format("rank{} {}", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "));
}

}  // namespace

void ShmCore::fail(CommFailure failure) noexcept {
  // First: whoever sees the failure may free what was in flight.
  if (arena_) arena_->keep_freed();
  if (!latch_.set(std::move(failure))) return;
  show_failure(*latch_.get());
  notify_always(pages_[0].event());
  for (const ShmPage& page : pages_) notify_always(page.mail_event());
}

void ShmCore::show_failure(const CommFailure& failure) noexcept {
  FailureRecord& record = pages_[rank_].failure();
  const std::size_t length = std::min(failure.message.size(), FailureRecord::kMaxText - 1);
  std::memcpy(record.text, failure.message.data(), length);
  record.text[length] = '\0';
  record.kind = static_cast<std::uint32_t>(failure.kind);
  record.peer_rank = failure.peer_rank;
  record.peer_pid = failure.peer_pid;
  record.is_set.store(1, std::memory_order_seq_cst);
}

// See NOTE [Ranks that are late].
void ShmCore::show_given_up() noexcept {
  pages_[rank_].given_up().store(barrier_, std::memory_order_release);
  pages_[0].event().num_given_up.fetch_add(1, std::memory_order_seq_cst);
}

void ShmCore::throw_if_given_up() {
  for (int r = 0; r < world_size_; ++r) {
    const std::uint64_t barrier = pages_[r].given_up().load(std::memory_order_acquire);
    if (r != rank_ && barrier != 0 && barrier <= barrier_) throw_given_up();
  }
}

void ShmCore::throw_given_up() {
  throw_if_failed(call_);
  int culprit = 0;
  while (culprit + 1 < world_size_ && pages_[culprit].given_up().load() == 0) ++culprit;
  fail_and_throw(call_, {.kind = CommFailure::Kind::Peer,
                         .message = fmt::format("rank {} (pid {}) gave it up", group_rank(culprit),
                                                pid_of(culprit)),
                         .peer_rank = group_rank(culprit),
                         .peer_pid = pid_of(culprit)});
}

// A failure that names a peer or the network is passed on as it is; an abort or a timeout is its
// rank's own doing.
void ShmCore::adopt_failure_of_peer() {
  for (int r = 0; r < world_size_; ++r) {
    const FailureRecord& record = pages_[r].failure();
    if (r == rank_ || record.is_set.load(std::memory_order_seq_cst) == 0) continue;
    const std::string text =
        printable_lines({record.text, strnlen(record.text, FailureRecord::kMaxText)});
    CommFailure failure{
        .message = text, .peer_rank = record.peer_rank, .peer_pid = record.peer_pid};
    const auto kind = static_cast<CommFailure::Kind>(record.kind);
    if (kind == CommFailure::Kind::Network) {
      failure.kind = kind;
    } else if (kind != CommFailure::Kind::Peer) {
      const char* verb = kind == CommFailure::Kind::Aborted ? "aborted" : "gave up";
      failure.message =
          fmt::format("rank {} (pid {}) {}: {}", group_rank(r), pid_of(r), verb, text);
    }
    const bool is_nobodys = failure.peer_rank < 0 && kind == CommFailure::Kind::Peer;
    if (!is_nobodys && (failure.peer_rank < 0 || failure.peer_rank == group_rank(rank_))) {
      failure.peer_rank = group_rank(r);
      failure.peer_pid = pid_of(r);
    }
    return fail(std::move(failure));
  }
}

void ShmCore::throw_if_failed(const CommCall* call) {
  if (!latch_.is_set()) adopt_failure_of_peer();
  if (latch_.is_set()) throw_kept(call, false);
}

void ShmCore::fail_and_throw(const CommCall* call, CommFailure failure) {
  fail(std::move(failure));
  throw_kept(call, false);
}

void ShmCore::throw_kept(const CommCall* call, bool is_earlier) const {
  const CommFailure& failure = *latch_.get();
  std::string message = failure.message;
  if (!message.starts_with("libddp[")) {
    const std::string where =
        fmt::format("libddp[group {}, rank {}/{}]", group_name_, group_rank(rank_), group_size_);
    const std::string what = call ? call->description.to_string(call->sequence) : "";
    if (!call || message.starts_with(what)) {
      message = fmt::format("{} {}", where, message);
    } else {
      const char* when = is_earlier ? "the group has failed before: " : "";
      message = fmt::format("{} {}: {}{}", where, what, when, message);
    }
  }
  throw_failure(failure, message);
}

void ShmCore::report_mismatch() {
  // What a rank called before it gave up is still there: that it gave up is the reason.
  throw_if_failed(call_);
  const std::vector<SameCall> calls = by_call(slots_[barrier_ & 1], barrier_);
  std::vector<std::string> called;
  for (const SameCall& call : calls) {
    called.push_back(fmt::format("{} called {}", ranks_text(*this, call.ranks),
                                 last_call_of(call.ranks.front())));
  }
  // Nobody is named as the peer: who is right is not known here.
  fail_and_throw(call_,
                 {.kind = CommFailure::Kind::Peer,
                  .message = fmt::format(
                      "the ranks called different collectives: {}. Hint: every rank must make the "
                      "same calls in the same order, with equal shapes and dtypes",
                      fmt::join(called, ", "))});
}

}  // namespace libddp
