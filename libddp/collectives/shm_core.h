#pragma once

// What every operation of a communicator stands on: the mapped pages and arenas, barriers, waiting,
// and the failure that ends it all. The collectives (shm_collectives.h) and the mail (mailbox.h)
// use it.
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
// Thread rule: begin, barrier and the chunk counter belong to the thread of the collectives; fail
// and the const members to any thread.
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
#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/failure_latch.h"
#include "libddp/collectives/futex_event.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/collectives/shm_page.h"
#include "libddp/collectives/wait_ledger.h"
#include "libddp/collectives/wait_policy.h"

namespace libddp {

/// Something that a rank can wait for.
class WaitCondition {
 public:
  virtual ~WaitCondition() = default;
  virtual bool ready() = 0;
  /// Ranks that hold the wait up, for the message of a timeout; empty = any rank.
  virtual std::vector<int> missing() const = 0;
  /// A rank that `ready` has found missing, for statistics; -1 = none in particular.
  virtual int blocker() const { return -1; }
  /// Throws if it is already clear that waiting is in vain; called once the wait lasts.
  virtual void check() {}
};

class ShmCore {
 public:
  explicit ShmCore(ShmCommOptions options);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// The number in the group of a rank of this host, and back (-1 for one that is not here).
  int group_rank(int rank) const { return members_[rank].group_rank; }
  int index_of(int group_rank) const;
  const WaitPolicy& policy() const { return policy_; }

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

  /// Offset of own memory in the own arena; kStaged if it is elsewhere.
  std::uint64_t offset_of(const void* pointer, std::size_t bytes) const;
  /// Memory of `rank`'s arena as mapped here. Throws PeerError if the range is not in it; `call` is
  /// for the message.
  std::byte* reach(const CommCall* call, int rank, std::uint64_t offset, std::uint64_t bytes);
  /// The same for the collective that runs. Throws if a peer has given it up.
  std::byte* reach(int rank, std::uint64_t offset, std::uint64_t bytes) {
    if (has_anyone_given_up()) throw_given_up();
    return reach(call_, rank, offset, bytes);
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
    return pages_[rank].staging_in(chunk);
  }
  std::byte* staging_out(int rank, std::uint64_t chunk) const {
    return pages_[rank].staging_out(chunk);
  }
  ShmPage page(int rank) const { return pages_[rank]; }

  /// Sleeps by the policy until `condition` is ready; REQUIRES that it was not just now.
  /// Errors: as ShmComm. Any exception out of it has poisoned the communicator.
  void wait(const CommCall& call, FutexEvent& event, WaitCondition& condition);

  /// Keeps the first failure, shows it to the peers, wakes everyone.
  void fail(CommFailure failure) noexcept;
  const CommFailure* failure() const noexcept { return latch_.get(); }
  /// As throw_if_failed, but only tells.
  bool has_failed() {
    if (!latch_.is_set()) adopt_failure_of_peer();
    return latch_.is_set();
  }
  /// Whether `rank` has shown a failure of its own.
  bool has_failed_at(int rank) const {
    return pages_[rank].failure().is_set.load(std::memory_order_acquire) != 0;
  }
  /// Throws the kept failure, also one that a peer has shown; `call` is what it interrupts.
  void throw_if_failed(const CommCall* call);
  /// `fail`, then throws it as the error of `call` (null: of no call in particular).
  [[noreturn]] void fail_and_throw(const CommCall* call, CommFailure failure);

  pid_t pid_of(int rank) const { return members_[rank].pid; }
  std::string last_call_of(int rank) const;
  /// The long waits of this rank, by ranks of the group. Of the thread of the collectives.
  WaitLedger& waits() { return waits_; }
  const WaitLedger& waits() const { return waits_; }
  /// Tells the ranks that wait for this one in the last stage whom it waited for itself.
  void show_delay(Delay delay);
  /// 0 before the first.
  std::uint64_t last_sequence_of(int rank) const;

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
  bool has_anyone_given_up() const {
    return pages_[0].event().num_given_up.load(std::memory_order_acquire) != 0;
  }
  void show_given_up() noexcept;
  void throw_if_given_up();
  [[noreturn]] void throw_given_up();
  void validate(const ShmCommOptions& options) const;
  void record(const CommCall& call);
  void adopt_failure_of_peer();
  void show_failure(const CommFailure& failure) noexcept;
  void settle(const CommCall& call, FutexEvent& event, WaitCondition& condition);
  void count_wait(int blocker, std::int64_t ns);
  Delay delay_shown_by(int rank) const;
  [[noreturn]] void give_up(const CommCall& call, const WaitCondition& condition, double seconds);
  [[noreturn]] void report_mismatch();
  [[noreturn]] void throw_kept(const CommCall* call, bool is_earlier) const;

  int rank_;
  int world_size_;
  int group_size_;
  std::string group_name_;
  std::shared_ptr<Arena> arena_;
  std::vector<ShmMember> members_;
  WaitPolicy policy_;
  std::vector<ShmPage> pages_;
  std::array<std::vector<Slot*>, 2> slots_;
  std::array<std::vector<std::byte*>, 2> payloads_;
  FailureLatch latch_;
  WaitLedger waits_;

  // The collective that runs.
  const CommCall* call_ = nullptr;
  Stage stage_ = Stage::First;
  std::uint64_t fingerprint_ = 0;
  std::uint64_t barrier_ = 0;
  std::uint64_t chunk_ = 0;
};

}  // namespace libddp
