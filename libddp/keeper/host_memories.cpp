#include "libddp/keeper/host_memories.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <utility>

#include "libddp/base/error.h"

namespace libddp {

std::optional<SavedStep> saved_in_replica(const KeptReplicas::Memory& memory, int slot) {
  const HeldSave held = HeldSave::of(memory, slot);
  return held ? std::optional(held.saved()) : std::nullopt;
}

void HostMemories::put(SlotMemory memory) {
  const std::lock_guard lock(mutex_);
  own_.put(std::move(memory));
}

void HostMemories::adopt(int rank, std::uint64_t generation) {
  const KeptReplicas::Replica replica = replicas_.find(rank, generation);
  put(SlotMemory::open(UniqueFd(::fcntl(replica.memory->fd(), F_DUPFD_CLOEXEC, 0))));
  replicas_.drop(rank, generation);
}

void HostMemories::forget_old() {
  const std::lock_guard lock(mutex_);
  own_.forget_old();
  const auto left = own_.all();
  if (!left.empty()) replicas_.forget_before(left.front()->identity().generation);
}

void HostMemories::forget_rank(int rank) {
  const std::lock_guard lock(mutex_);
  own_.forget_rank(rank);
}

void HostMemories::unreserve(int rank) {
  for (const Memory& memory : own()) {
    if (memory->identity().rank != rank) continue;
    for (int i = 0; i < SlotMemory::kSlots; ++i) memory->slot(i).unreserve();
  }
}

bool HostMemories::is_known(const SlotMemory& memory) const {
  const SlotIdentity& identity = memory.identity();
  for (const Memory& other : {find(identity.rank, identity.generation),
                              replicas_.find(identity.rank, identity.generation).memory}) {
    struct stat one {};
    struct stat two {};
    if (!other || ::fstat(memory.fd(), &one) != 0 || ::fstat(other->fd(), &two) != 0) continue;
    if (one.st_dev == two.st_dev && one.st_ino == two.st_ino) return true;
  }
  return false;
}

HostMemories::Memory HostMemories::find(int rank, std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return own_.find(rank, generation);
}

std::vector<HostMemories::Memory> HostMemories::own() const {
  const std::lock_guard lock(mutex_);
  return own_.all();
}

bool HostMemories::is_empty() const { return own().empty() && replicas_.is_empty(); }

std::optional<KeptMemories::Common> HostMemories::newest_common() const {
  const std::lock_guard lock(mutex_);
  return own_.newest_common();
}

void HostMemories::note_complete(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  own_.note_complete(sequence);
}

std::set<std::uint64_t> HostMemories::complete() const {
  const std::lock_guard lock(mutex_);
  return own_.complete();
}

HeldSave HostMemories::lend(const ReplicaPlace& place) const {
  std::vector<std::uint64_t> here;
  bool is_reserved = false;
  const auto look = [&](const Memory& memory, bool is_own) {
    for (int i = 0; memory && i < SlotMemory::kSlots; ++i) {
      // Not held where another save is: that would be in its writer's way.
      const auto seen = is_own ? memory->slot(i).whole() : saved_in_replica(memory, i);
      if (seen) here.push_back(seen->sequence);
      if (!seen || seen->sequence != place.sequence) continue;
      HeldSave held = HeldSave::of(memory, i);
      if (held && held.saved() == *seen) return held;
      is_reserved = is_reserved || (is_own && !held && memory->slot(i).whole() == seen);
    }
    return HeldSave();
  };
  HeldSave held = look(find(place.rank, place.generation), true);
  if (!held) held = look(replicas_.find(place.rank, place.generation).memory, false);
  if (held || is_reserved) return held;
  throw SnapshotError(
      fmt::format("save {} of rank {}, layout {}, is not there; the saves there: {}",
                  place.sequence, place.rank, place.generation,
                  here.empty() ? "none" : fmt::format("{}", fmt::join(here, ", "))));
}

template <typename Fits>
HostMemories::Whose HostMemories::find_save(int rank, std::uint64_t generation, Fits fits) const {
  const Memory own = find(rank, generation);
  const Memory replica = replicas_.find(rank, generation).memory;
  for (int i = 0; i < SlotMemory::kSlots; ++i) {
    const auto saved = own ? own->slot(i).whole() : std::nullopt;
    if (saved && fits(saved->sequence)) return Whose::Own;
    const auto copied = replica ? saved_in_replica(replica, i) : std::nullopt;
    if (copied && fits(copied->sequence)) return Whose::Replica;
  }
  return Whose::Nobody;
}

HostMemories::Whose HostMemories::where(int rank, std::uint64_t generation,
                                        std::uint64_t sequence) const {
  return find_save(rank, generation, [=](std::uint64_t there) { return there == sequence; });
}

bool HostMemories::has_since(int rank, std::uint64_t generation, std::uint64_t sequence) const {
  const auto is_since = [=](std::uint64_t there) { return there >= sequence; };
  return find_save(rank, generation, is_since) != Whose::Nobody;
}

}  // namespace libddp
