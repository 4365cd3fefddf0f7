#include "libddp/collectives/shm_failure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "libddp/base/printable.h"
#include "libddp/collectives/futex_event.h"

namespace libddp {

void ShmFailure::fail(GroupFailure failure) noexcept {
  // First: whoever sees the failure may free what was in flight.
  if (peers_.arena()) peers_.arena()->keep_freed();
  if (!latch_.set(std::move(failure))) return;
  show(*latch_.get());
  notify_always(peers_.page(0).event());
  for (const ShmPage& page : peers_.pages()) notify_always(page.mail_event());
}

void ShmFailure::show(const GroupFailure& failure) noexcept {
  FailureRecord& record = peers_.own_page().failure();
  const std::size_t length = std::min(failure.message.size(), FailureRecord::kMaxText - 1);
  std::memcpy(record.text, failure.message.data(), length);
  record.text[length] = '\0';
  record.kind = static_cast<std::uint32_t>(failure.kind);
  record.peer_rank = failure.peer_rank;
  record.peer_pid = failure.peer_pid;
  record.is_set.store(1, std::memory_order_seq_cst);
}

bool ShmFailure::has_failed() {
  if (!latch_.is_set()) adopt_failure_of_peer();
  return latch_.is_set();
}

bool ShmFailure::has_failed_at(int rank) const {
  return peers_.page(rank).failure().is_set.load(std::memory_order_acquire) != 0;
}

void ShmFailure::adopt_failure_of_peer() {
  for (int r = 0; r < peers_.world_size(); ++r) {
    const ShmPage page = peers_.page(r);
    const FailureRecord& record = page.failure();
    if (r == peers_.rank() || record.is_set.load(std::memory_order_seq_cst) == 0) continue;
    const int rank = peers_.group_rank(r);
    const pid_t pid = peers_.pid_of(r);
    return fail(
        told_by(fmt::format("rank {} (pid {})", rank, pid), rank, pid,
                {static_cast<GroupFailure::Kind>(record.kind),
                 printable_lines({record.text, strnlen(record.text, FailureRecord::kMaxText)}),
                 record.peer_rank, record.peer_pid}));
  }
}

void ShmFailure::throw_if_failed(const CommCall* call) {
  if (!latch_.is_set()) adopt_failure_of_peer();
  if (latch_.is_set()) throw_kept(call, false);
}

void ShmFailure::fail_and_throw(const CommCall* call, GroupFailure failure) {
  fail(std::move(failure));
  throw_kept(call, false);
}

void ShmFailure::throw_kept(const CommCall* call, bool is_earlier) const {
  const GroupFailure& failure = *latch_.get();
  std::string message = failure.message;
  if (!message.starts_with("libddp[")) {
    const std::string where = peers_.where();
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

std::byte* ShmFailure::reach(const CommCall* call, int rank, std::uint64_t offset,
                             std::uint64_t bytes) {
  const SharedSegment& segment = peers_.arena_of(rank);
  if (offset > segment.size_bytes() || bytes > segment.size_bytes() - offset) {
    fail_and_throw(call, {.kind = GroupFailure::Kind::Peer,
                          .message = fmt::format("rank {} (pid {}) named bytes {} to {} of an "
                                                 "arena of {} bytes",
                                                 peers_.group_rank(rank), peers_.pid_of(rank),
                                                 offset, offset + bytes, segment.size_bytes()),
                          .peer_rank = peers_.group_rank(rank),
                          .peer_pid = peers_.pid_of(rank)});
  }
  return segment.data() + offset;
}

}  // namespace libddp
