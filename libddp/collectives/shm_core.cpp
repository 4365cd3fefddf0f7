#include "libddp/collectives/shm_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "libddp/base/cache_line.h"
#include "libddp/base/error.h"

namespace libddp {

/// Everyone has posted barrier n.
class ShmCore::AllArrived final : public WaitCondition {
 public:
  explicit AllArrived(ShmCore& core)
      : core_(core), slots_(core.slots_[core.barrier_ & 1]), number_(core.barrier_) {}

  bool ready() override {
    while (next_ < slots_.size() && has_come(next_)) ++next_;
    return next_ == slots_.size();
  }
  std::vector<int> missing() const override {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < slots_.size(); ++r) {
      if (!has_come(r)) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  }
  int blocker() const override { return next_ < slots_.size() ? static_cast<int>(next_) : -1; }
  /// A mismatch is told as soon as it is seen: the missing ranks may never come.
  void check() override {
    for (std::size_t r = 0; r < slots_.size(); ++r) {
      if (has_come(r) && slots_[r]->fingerprint != core_.fingerprint_) core_.report_mismatch();
    }
  }

 private:
  bool has_come(std::size_t rank) const {
    return slots_[rank]->stamp.load(std::memory_order_seq_cst) == number_;
  }

  ShmCore& core_;
  const std::vector<Slot*>& slots_;
  const std::uint64_t number_;
  std::size_t next_ = 0;
};

ShmCore::ShmCore(ShmCommOptions options)
    : rank_(options.rank),
      world_size_(options.world_size),
      group_size_(options.group_size > 0 ? options.group_size : options.world_size),
      group_name_(std::move(options.group_name)),
      arena_(std::move(options.arena)),
      waits_(group_size_) {
  validate(options);
  members_ = std::move(options.members);
  std::vector<std::string> masks;
  for (ShmMember& member : members_) {
    if (member.group_rank < 0) member.group_rank = static_cast<int>(masks.size());
    masks.push_back(member.cpu_mask);
    const ShmPage& page = pages_.emplace_back(member.page.data(), world_size_);
    for (std::size_t parity : {0u, 1u}) {
      slots_[parity].push_back(&page.slot(parity));
      payloads_[parity].push_back(page.inline_payload(parity));
    }
  }
  policy_ = WaitPolicy::choose(masks);
}

void ShmCore::validate(const ShmCommOptions& options) const {
  if (world_size_ < 1 || world_size_ > kMaxRanks || rank_ < 0 || rank_ >= world_size_ ||
      options.members.size() != static_cast<std::size_t>(world_size_)) {
    throw ArgumentError(fmt::format(
        "libddp[group {}]: cannot form a communicator of {} ranks with {} members as rank {}. "
        "Hint: 1 to {} "
        "ranks per host, one member per rank.",
        group_name_, world_size_, options.members.size(), rank_, kMaxRanks));
  }
  for (int r = 0; r < world_size_; ++r) {
    const SharedSegment& page = options.members[r].page;
    if (page.size_bytes() >= ShmPage::size_bytes(world_size_)) continue;
    throw PeerError(
        fmt::format(
            "libddp[group {}, rank {}/{}]: the control page of rank {} has {} bytes, {} are "
            "needed. Hint: all ranks must run the same version of libddp.",
            group_name_, rank_, world_size_, r, page.size_bytes(),
            ShmPage::size_bytes(world_size_)),
        r, options.members[r].pid);
  }
}

int ShmCore::index_of(int group_rank) const {
  for (int r = 0; r < world_size_; ++r) {
    if (members_[r].group_rank == group_rank) return r;
  }
  return -1;
}

void ShmCore::begin(const CommCall& call, Stage stage) {
  if (latch_.is_set()) throw_kept(&call, true);
  call_ = &call;
  stage_ = stage;
  // The hosts have met, by this rank or another one: earlier waits do not delay anybody any more.
  if (stage == Stage::Last) waits_.forget();
  fingerprint_ = call.description.fingerprint(call.sequence);
  record(call);
}

// Relaxed words: plain stores for the machine, and a reader in another process may look at any
// time.
void ShmCore::record(const CommCall& call) {
  std::atomic<std::uint64_t>& num_calls = pages_[rank_].num_calls();
  const std::uint64_t number = num_calls.load(std::memory_order_relaxed);
  CallRecord& shown = pages_[rank_].call(number);
  std::uint64_t words[CallRecord::kWords] = {};
  std::memcpy(words, &call.description, sizeof(OpDescription));
  for (std::size_t i = 0; i < CallRecord::kWords; ++i) {
    shown.words[i].store(words[i], std::memory_order_relaxed);
  }
  shown.sequence.store(call.sequence, std::memory_order_relaxed);
  num_calls.store(number + 1, std::memory_order_release);
}

std::string ShmCore::last_call_of(int rank) const {
  const std::uint64_t number = pages_[rank].num_calls().load(std::memory_order_acquire);
  if (number == 0) return "nothing yet";
  const CallRecord& shown = pages_[rank].call(number - 1);
  std::uint64_t words[CallRecord::kWords];
  for (std::size_t i = 0; i < CallRecord::kWords; ++i) {
    words[i] = shown.words[i].load(std::memory_order_relaxed);
  }
  OpDescription description;
  std::memcpy(static_cast<void*>(&description), words, sizeof(OpDescription));
  return description.to_string(shown.sequence.load(std::memory_order_relaxed));
}

std::uint64_t ShmCore::last_sequence_of(int rank) const {
  const std::uint64_t number = pages_[rank].num_calls().load(std::memory_order_acquire);
  if (number == 0) return 0;
  return pages_[rank].call(number - 1).sequence.load(std::memory_order_relaxed);
}

void ShmCore::barrier(std::uint64_t input_place, std::uint64_t output_place) {
  post(input_place, output_place);
  await_everyone();
}

void ShmCore::barrier_with_payload(std::size_t bytes) {
  post(Slot::kInline, Slot::kStaged);
  if (bytes > Slot::kTinyBytes) prefetch_payloads(bytes);
  await_everyone();
}

// The peers' payloads cross the machine beside their stamps instead of after them.
void ShmCore::prefetch_payloads(std::size_t bytes) const {
  constexpr std::size_t kMostBytes = 8 * kCacheLineBytes;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    const std::byte* payload = payload_at(r, barrier_, bytes);
    for (std::size_t at = 0; at < std::min(bytes, kMostBytes); at += kCacheLineBytes) {
      __builtin_prefetch(payload + at);
    }
  }
}

void ShmCore::post(std::uint64_t input_place, std::uint64_t output_place) {
  const std::uint64_t number = ++barrier_;
  Slot& mine = *slots_[number & 1][rank_];
  mine.fingerprint = fingerprint_;
  mine.place[0] = input_place;
  mine.place[1] = output_place;
  // See NOTE [Rings without a fence] in shm_wait.cpp.
  mine.stamp.store(number,
                   policy_.oversubscribed ? std::memory_order_seq_cst : std::memory_order_release);
}

void ShmCore::await_everyone() {
  try {
    AllArrived barrier(*this);
    if (!barrier.ready()) wait(*call_, pages_[0].event(), barrier);
    for (const Slot* slot : slots_[barrier_ & 1]) {
      if (slot->fingerprint != fingerprint_) report_mismatch();
    }
    if (has_anyone_given_up()) throw_if_given_up();
  } catch (...) {
    show_given_up();
    throw;
  }
  // Whoever finds the barrier complete wakes those who sleep: the last one to come is among them.
  notify(pages_[0].event());
}

std::uint64_t ShmCore::place(int rank, int which) const {
  return slots_[barrier_ & 1][rank]->place[which];
}

bool ShmCore::all_in_arena(int which) const {
  for (int r = 0; r < world_size_; ++r) {
    if (place(r, which) >= Slot::kInline) return false;
  }
  return true;
}

bool ShmCore::none_in_arena(int which) const {
  for (int r = 0; r < world_size_; ++r) {
    if (place(r, which) < Slot::kInline) return false;
  }
  return true;
}

std::uint64_t ShmCore::offset_of(const void* pointer, std::size_t bytes) const {
  if (!arena_) return Slot::kStaged;
  return arena_->offset_of(pointer, bytes).value_or(Slot::kStaged);
}

std::byte* ShmCore::reach(const CommCall* call, int rank, std::uint64_t offset,
                          std::uint64_t bytes) {
  const SharedSegment& segment = rank == rank_ ? arena_->segment() : members_[rank].arena;
  if (offset > segment.size_bytes() || bytes > segment.size_bytes() - offset) {
    fail_and_throw(call, {.kind = CommFailure::Kind::Peer,
                          .message = fmt::format("rank {} (pid {}) named bytes {} to {} of an "
                                                 "arena of {} bytes",
                                                 group_rank(rank), pid_of(rank), offset,
                                                 offset + bytes, segment.size_bytes()),
                          .peer_rank = group_rank(rank),
                          .peer_pid = pid_of(rank)});
  }
  return segment.data() + offset;
}

}  // namespace libddp
