#include "libddp/snapshot/rank_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "libddp/base/check.h"
#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/snapshot/staged_chunks.h"

namespace libddp {
namespace {

/// A keeper starts in milliseconds; an old process of this rank may take a while to die.
Deadline meeting_end() { return Deadline::after(std::chrono::seconds(30)); }

}  // namespace

// Values grow (counters, lists): room for twice as much spares a new memory.
std::uint64_t RankMemory::values_capacity(std::size_t values_bytes) {
  constexpr std::uint64_t kSmallest = 64 << 10;
  return std::max(kSmallest, 2 * static_cast<std::uint64_t>(values_bytes));
}

RankMemory::RankMemory(KeeperStart start, SlotIdentity identity,
                       std::optional<KeeperStorage> storage)
    : start_(std::move(start)),
      identity_(std::move(identity)),
      storage_(std::move(storage)),
      agent_(launching_agent()) {
  connect();
}

void RankMemory::connect() {
  keeper_.emplace(connect_or_start(
      start_, {.is_worker = true, .agent = agent_, .rank = identity_.rank}, meeting_end()));
}

template <typename Call>
auto RankMemory::with_keeper(Call&& call) {
  if (!keeper_->is_gone()) {
    try {
      return call(*keeper_);
    } catch (const NetworkError&) {
      // It has died; below.
    }
  }
  log(LogLevel::Warn, "keeper_lost", {{"run", start_.run}, {"rank", identity_.rank}});
  connect();
  if (memory_) keeper_->put(*memory_, storage_);
  has_moved_ = key_ != nullptr;
  // What the one before was storing.
  if (storing_ && stored_slot_) keeper_->store(*memory_, *stored_slot_, *storage_);
  return call(*keeper_);
}

std::vector<std::shared_ptr<SlotMemory>> RankMemory::fetch() {
  std::vector<std::shared_ptr<SlotMemory>> fetched;
  for (UniqueFd& fd : with_keeper([](KeeperClient& keeper) { return keeper.get(); })) {
    try {
      if (const auto known = mapped(fd.get())) {
        known->check();
        fetched.push_back(known);
      } else {
        fetched.push_back(std::make_shared<SlotMemory>(SlotMemory::open(std::move(fd))));
      }
    } catch (const Error& error) {
      log(LogLevel::Warn, "snapshot_memory_damaged", {{"reason", error.what()}});
    }
  }
  fetched_ = fetched;
  return fetched;
}

std::shared_ptr<SlotMemory> RankMemory::mapped(int fd) const {
  if (memory_ && memory_->is_behind(fd)) return memory_;
  const auto found = std::find_if(fetched_.begin(), fetched_.end(),
                                  [&](const auto& memory) { return memory->is_behind(fd); });
  return found == fetched_.end() ? nullptr : *found;
}

void RankMemory::adopt(const std::shared_ptr<SlotMemory>& memory, int slot) {
  stop_prefault();
  const bool is_mapped = memory == memory_;
  memory_ = memory;
  pieces_.clear();
  turns_.restart(slot);
  stored_slot_.reset();
  storing_.reset();
  // Its writer may have died with one of them reserved.
  withdraw();
  // What is written next is mapped behind the training: page by page that takes as long as the
  // copy.
  if (!is_mapped) start_prefault(turns_.candidates(/*may_use_spare=*/false).front());
}

RankMemory::Offer RankMemory::offer(const OwnPieces& own, std::size_t values_bytes) {
  if (keeper_->is_gone()) with_keeper([](KeeperClient&) {});
  Offer offer;
  offer.has_moved = has_moved_;
  if (storing_) {
    const bool is_done = with_keeper(
        [&](KeeperClient& keeper) { return keeper.is_done(identity_.rank, *storing_); });
    if (is_done) storing_.reset();
    offer.is_stored = is_done;
  }
  bool is_same = memory_ && values_bytes <= memory_->values_capacity();
  if (is_same && own.pieces() != pieces_) {
    is_same = PieceLayout::of(own.pieces()).text() == memory_->layout().text();
    if (is_same) pieces_ = own.pieces();
  }
  offer.needs_memory = !is_same;
  // All ranks make a new one if one of them does.
  const PieceLayout layout = is_same ? memory_->layout() : PieceLayout::of(own.pieces());
  offer.bytes_needed = SlotMemory::bytes_needed(layout, values_capacity(values_bytes));
  for (std::size_t i = 0; memory_ && i < kSlots; ++i) {
    offer.can_write[i] = memory_->slot(static_cast<int>(i)).try_reserve();
  }
  return offer;
}

void RankMemory::withdraw(std::optional<int> except) {
  for (int i = 0; memory_ && i < SlotMemory::kSlots; ++i) {
    if (i != except) memory_->slot(i).unreserve();
  }
}

void RankMemory::make(const OwnPieces& own, std::size_t values_bytes, std::uint64_t generation,
                      SharedSegment reserved) {
  SlotIdentity identity = identity_;
  identity.generation = generation;
  auto fresh = std::make_shared<SlotMemory>(SlotMemory::create(
      PieceLayout::of(own.pieces()), identity, values_capacity(values_bytes), std::move(reserved)));
  with_keeper([&](KeeperClient& keeper) { keeper.put(*fresh, storage_); });
  stop_prefault();
  memory_ = std::move(fresh);
  fetched_.clear();
  pieces_ = own.pieces();
  turns_.restart(std::nullopt);
  stored_slot_.reset();
}

void RankMemory::fill(int slot, const SavedStep& saved, const OwnPieces& own,
                      std::string_view values, int num_threads) {
  stop_prefault();
  turns_.take(slot);
  StagedChunks chunks(own.in_order_of(memory_->layout()));
  LIBDDP_CHECK(chunks.total() == memory_->layout().data_bytes(),
               "tensors that are not the layout's");
  const auto copy = [&](std::size_t index, std::byte* to) { return chunks.copy(index, to); };
  memory_->slot(slot).fill(saved, copy, values, num_threads);
}

void RankMemory::start_prefault(int slot) {
  const auto data = memory_->slot(slot).data();
  prefault_ = prefault(memory_->data() + (data.data() - memory_->data()), data.size());
}

void RankMemory::stop_prefault() {
  if (prefault_) prefault_->cancel();
  prefault_.reset();
}

void RankMemory::commit(int slot) {
  const bool is_first = !turns_.newest();
  turns_.fill(slot);
  // Its first pages cost ten times what the copy does: those of the other slot come beside the
  // training, before they are needed.
  const int next = turns_.candidates(/*may_use_spare=*/false).front();
  if (is_first && !memory_->slot(next).whole()) start_prefault(next);
  const std::uint64_t sequence = memory_->slot(slot).whole()->sequence;
  with_keeper([&](KeeperClient& keeper) { keeper.complete(sequence); });
  if (stored_slot_ == slot) stored_slot_.reset();
}

void RankMemory::store() {
  const int slot = *turns_.newest();
  with_keeper([&](KeeperClient& keeper) { keeper.store(*memory_, slot, *storage_); });
  stored_slot_ = slot;
  storing_ = last_stored_ = memory_->slot(slot).whole()->sequence;
}

std::string RankMemory::listen(std::shared_ptr<const RunKey> key) {
  key_ = std::move(key);
  has_moved_ = false;
  const std::string where = env_text("LIBDDP_SOCKET_IFNAME").value_or("");
  return with_keeper([&](KeeperClient& keeper) { return keeper.listen(where, *key_); });
}

void RankMemory::pull(const std::string& address, int rank, const SavedStep& saved,
                      std::uint64_t generation, PullPurpose purpose) {
  with_keeper([&](KeeperClient& keeper) {
    // One that has taken another's place shows no key yet.
    if (!has_moved_) keeper.pull(address, rank, generation, saved.sequence, purpose);
  });
}

Pulled RankMemory::pulled(const std::vector<int>& ranks, const SavedStep& saved,
                          std::uint64_t generation) {
  return with_keeper(
      [&](KeeperClient& keeper) { return keeper.pulled(ranks, generation, saved.sequence); });
}

void RankMemory::wait_pull(int rank, const SavedStep& saved, std::uint64_t generation,
                           Deadline deadline) {
  with_keeper(
      [&](KeeperClient& keeper) { keeper.wait_pull(rank, generation, saved.sequence, deadline); });
}

void RankMemory::wait(Deadline deadline) {
  if (last_stored_ == 0) return;
  with_keeper([&](KeeperClient& keeper) { keeper.wait(identity_.rank, last_stored_, deadline); });
  storing_.reset();
}

void RankMemory::finish() {
  if (!keeper_->is_gone()) keeper_->finish();
}

std::string RankMemory::status() {
  return with_keeper([](KeeperClient& keeper) { return keeper.status(); });
}

}  // namespace libddp
