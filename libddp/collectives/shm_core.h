#pragma once

// What the collectives of a host (shm_collectives.h) are written over: barriers at which every rank
// shows what it brings and where it is, and the memory behind that.
//
// Words: *place* = where a rank's bytes are: an offset in its arena, kInline (in the payload of its
// slot) or kStaged (in its staging buffer); *buffer* = parity of a staging chunk.
//
// NOTE [Reuse of shared buffers]
// A barrier is passed by a rank once all ranks have posted it. Hence:
// - a slot and its payload, written before barrier n, may be read until the reader posts n+1 and
//   written again after n+1 is passed (slots alternate);
// - staging_in, written before barrier n for chunk c, may be read until the reader posts n+1; the
//   buffer serves again for chunk c+2, of which the writing starts after n+1 is passed;
// - staging_out, written between barriers n and n+1, may be read until the reader posts n+2.
// Chunks are counted through the life of the communicator, so these hold across collectives, and
// none needs a barrier at its end only to protect staging.
//
// NOTE [Ranks that are late]
// A rank that was frozen (SIGSTOP) in a collective wakes after its peers have given up: their
// stamps still stand there, so its barriers look complete, and its pointers lead into memory that
// they may have put to another use. So who leaves a barrier by an exception says which, before its
// caller gets the memory back, and every rank looks
// - when it has passed a barrier: a peer that gave up there took no part in what the barrier means
//   (one that gave up later has passed it);
// - before it touches a peer's memory, and again every kWriteBytes of writing: nobody who gave up
//   can have finished the collective, which ends with a barrier after the last access.
// What such a rank had under way when it froze, kWriteBytes at most, still lands in the peer's
// memory. The arena of a failed communicator therefore keeps what is freed (Arena::keep_freed).
//
// Thread rule: that of the collectives, one thread; failure() and the const members any.
//
//   core.begin(call);
//   std::memcpy(core.own_payload(bytes), data, bytes);
//   core.barrier_with_payload(bytes);
//   read(core.payload(peer, bytes));

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "libddp/collectives/shm_failure.h"
#include "libddp/collectives/shm_options.h"
#include "libddp/collectives/shm_page.h"
#include "libddp/collectives/shm_peers.h"
#include "libddp/collectives/shm_waiter.h"

namespace libddp {

class ShmCore {
 public:
  explicit ShmCore(ShmCommOptions options);
  ShmCore(const ShmCore&) = delete;
  ShmCore& operator=(const ShmCore&) = delete;

  ShmPeers& peers() { return peers_; }
  const ShmPeers& peers() const { return peers_; }
  ShmFailure& failure() { return failure_; }
  const ShmFailure& failure() const { return failure_; }
  WaitLedger& waits() { return waiter_.ledger(); }
  const WaitLedger& waits() const { return waiter_.ledger(); }
  const WaitPolicy& policy() const { return waiter_.policy(); }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  /// Of a collective over several hosts: the one before the network, or the one after it.
  enum class Stage : std::uint8_t { First, Last };
  /// Starts a collective: throws the kept failure, records the call for the peers' messages.
  void begin(const CommCall& call, Stage stage = Stage::First);
  /// Posts the slot and waits for everyone's; throws if somebody called something else.
  void barrier(std::uint64_t input_place = Slot::kStaged,
               std::uint64_t output_place = Slot::kStaged);

  /// `barrier` for ranks that all bring a payload of this size in the slot.
  void barrier_with_payload(std::size_t bytes);

  /// Where the payload of the next barrier goes. REQUIRES bytes <= ShmPage::kInlineBytes.
  std::byte* own_payload(std::size_t bytes) const { return payload_at(rank_, barrier_ + 1, bytes); }
  /// The payload that `rank` brought to the last barrier.
  const std::byte* payload(int rank, std::size_t bytes) const {
    return payload_at(rank, barrier_, bytes);
  }
  /// The place that `rank` named at the last barrier; which = 0 input, 1 output.
  std::uint64_t place(int rank, int which = 0) const;
  bool all_in_arena(int which = 0) const;
  bool none_in_arena(int which = 0) const;

  /// Memory of `rank`'s arena as mapped here, for the collective that runs. Throws PeerError if the
  /// range is not in it, and if a peer has given the collective up.
  std::byte* reach(int rank, std::uint64_t offset, std::uint64_t bytes) {
    if (has_anyone_given_up()) throw_given_up();
    return failure_.reach(call_, rank, offset, bytes);
  }
  /// write(begin, bytes) for piece after piece of `bytes` in peers' memory. Throws between two if a
  /// peer has given up the collective.
  template <class Write>
  void write_in_pieces(std::size_t bytes, Write write) {
    for (std::size_t at = 0; at < bytes; at += kWriteBytes) {
      if (at > 0 && has_anyone_given_up()) throw_given_up();
      write(at, std::min(kWriteBytes, bytes - at));
    }
  }

  /// Number of the next staging chunk; its parity chooses the buffer.
  std::uint64_t next_chunk() { return chunk_++; }
  std::byte* staging_in(int rank, std::uint64_t chunk) const {
    return peers_.page(rank).staging_in(chunk);
  }
  std::byte* staging_out(int rank, std::uint64_t chunk) const {
    return peers_.page(rank).staging_out(chunk);
  }

 private:
  class AllArrived;
  /// Whole elements and cache lines; long enough for the kernels.
  static constexpr std::size_t kWriteBytes = 4u << 20;

  std::byte* payload_at(int rank, std::uint64_t barrier, std::size_t bytes) const {
    const int parity = static_cast<int>(barrier & 1);
    return bytes <= Slot::kTinyBytes ? slots_[parity][rank]->tiny : payloads_[parity][rank];
  }
  void post(std::uint64_t input_place, std::uint64_t output_place);
  void prefetch_payloads(std::size_t bytes) const;
  void await_everyone();
  FutexEvent& event() const { return peers_.page(0).event(); }
  bool has_anyone_given_up() const {
    return event().num_given_up.load(std::memory_order_acquire) != 0;
  }
  void show_given_up() noexcept;
  void throw_if_given_up();
  [[noreturn]] void throw_given_up();
  [[noreturn]] void report_mismatch();

  ShmPeers peers_;
  ShmFailure failure_;
  ShmWaiter waiter_;
  // Copies of those in peers_, for the hot path.
  const int rank_;
  const int world_size_;
  std::array<std::vector<Slot*>, 2> slots_;
  std::array<std::vector<std::byte*>, 2> payloads_;

  // The collective that runs.
  const CommCall* call_ = nullptr;
  std::uint64_t fingerprint_ = 0;
  std::uint64_t barrier_ = 0;
  std::uint64_t chunk_ = 0;
};

}  // namespace libddp
