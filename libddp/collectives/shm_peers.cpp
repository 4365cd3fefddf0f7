#include "libddp/collectives/shm_peers.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {

ShmPeers::ShmPeers(ShmCommOptions options)
    : rank_(options.rank),
      world_size_(options.world_size),
      group_size_(options.group_size > 0 ? options.group_size : options.world_size),
      group_name_(std::move(options.group_name)),
      arena_(std::move(options.arena)) {
  validate(options);
  members_ = std::move(options.members);
  for (ShmMember& member : members_) {
    if (member.group_rank < 0) member.group_rank = static_cast<int>(pages_.size());
    pages_.emplace_back(member.page.data(), world_size_);
  }
}

void ShmPeers::validate(const ShmCommOptions& options) const {
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

int ShmPeers::index_of(int group_rank) const {
  for (int r = 0; r < world_size_; ++r) {
    if (members_[r].group_rank == group_rank) return r;
  }
  return -1;
}

std::vector<std::string> ShmPeers::cpu_masks() const {
  std::vector<std::string> masks;
  for (const ShmMember& member : members_) masks.push_back(member.cpu_mask);
  return masks;
}

std::string ShmPeers::where() const {
  return fmt::format("libddp[group {}, rank {}/{}]", group_name_, group_rank(rank_), group_size_);
}

std::uint64_t ShmPeers::offset_of(const void* pointer, std::size_t bytes) const {
  if (!arena_) return Slot::kStaged;
  return arena_->offset_of(pointer, bytes).value_or(Slot::kStaged);
}

// Relaxed words: plain stores for the machine, and a reader in another process may look at any
// time.
void ShmPeers::record(const CommCall& call) {
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

std::string ShmPeers::last_call_of(int rank) const {
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

std::uint64_t ShmPeers::last_sequence_of(int rank) const {
  const std::uint64_t number = pages_[rank].num_calls().load(std::memory_order_acquire);
  if (number == 0) return 0;
  return pages_[rank].call(number - 1).sequence.load(std::memory_order_relaxed);
}

void ShmPeers::show_delay(Delay delay) {
  DelayRecord& shown = pages_[rank_].carried_delay();
  shown.rank.store(delay.rank, std::memory_order_relaxed);
  shown.ns.store(delay.ns, std::memory_order_relaxed);
}

Delay ShmPeers::delay_shown_by(int rank) const {
  const DelayRecord& shown = pages_[rank].carried_delay();
  return {static_cast<int>(shown.rank.load(std::memory_order_relaxed)),
          shown.ns.load(std::memory_order_relaxed)};
}

}  // namespace libddp
