#pragma once

// Collectives and messages between the ranks of one group, as the group room uses them: ShmComm
// for the ranks of one host, HierarchicalComm for those of several. Bytes in, bytes out: no
// tensors, no threads, no store.
//
// `fail` (from any thread) wakes all waiters of this process; the first failure is kept and every
// later call throws the same cause.
//
// Thread rule: collectives of one communicator run one at a time, in the same order on all ranks
// (the caller serialises); `fail`, `failure`, `last_call_of` and the network calls may come from
// any thread at any time; `progress` and `wait_for_mail` from one thread at a time.
//
//   void step(Comm& comm, const CommCall& call, float* data) { comm.all_reduce(call, data); }

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/group_failure.h"
#include "libddp/base/op_description.h"

namespace libddp {

/// One collective of this rank.
struct CommCall {
  OpDescription description;
  std::uint64_t sequence = 0;
  Deadline deadline = Deadline::never();
  /// Instead of `deadline`: counts from the moment at which the call first has to wait for long, so
  /// that a call that finds everyone there never reads the clock.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  /// Asked before the call gives up on `ranks` (of the group): what else is known of them, for the
  /// message. Null = nothing.
  const std::function<std::string(const std::vector<int>& ranks)>* notes = nullptr;
};

class Comm {
 public:
  virtual ~Comm() = default;

  /// "host" or "hosts".
  virtual std::string name() const = 0;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // In each of these `call.description` says dtype, op, count and root; pointers may be any memory.
  // Errors: PeerError (a peer died, or called something else: both calls are named), TimeoutError
  // (names the ranks that did not come), StateError (aborted).

  /// In place over `count` elements. `scale` multiplies the result (1/p for Avg is the
  /// communicator's own).
  virtual void all_reduce(const CommCall& call, void* data, double scale) = 0;
  /// `input` holds world_size blocks of `output_count` elements; the own block is reduced into
  /// `output`. They may overlap only if output is exactly the own block.
  virtual void reduce_scatter(const CommCall& call, const void* input, void* output,
                              std::uint64_t output_count, double scale) = 0;
  /// `output` holds world_size blocks of `input_bytes`. `input` may be the own block in place.
  virtual void all_gather(const CommCall& call, const void* input, void* output,
                          std::uint64_t input_bytes) = 0;
  /// `input` and `output` hold world_size blocks of `block_bytes`: block r goes to rank r. The own
  /// block is left to the caller. False, and nothing has happened, where blocks must go as
  /// messages.
  virtual bool all_to_all(const CommCall& call, const void* input, void* output,
                          std::uint64_t block_bytes) = 0;
  virtual void broadcast(const CommCall& call, void* data, std::uint64_t bytes, int root) = 0;
  virtual void barrier(const CommCall& call) = 0;

  /// One part of a batch that runs as a whole: no order between the parts can deadlock.
  struct Transfer {
    bool is_send = false;
    /// -1 on a receive = any source.
    int peer = 0;
    int tag = 0;
    void* data = nullptr;
    std::uint64_t bytes = 0;
    /// For messages about it.
    OpDescription description = {};

    // Progress, kept by the communicator.
    std::uint64_t moved_bytes = 0;
    bool is_started = false;
    bool is_done = false;
    /// Rank that a finished receive came from.
    int source = -1;
    /// Number of the message on its channel.
    std::uint64_t message = 0;
  };

  // Point to point, for the group room's message queue, which keeps many isend/irecv in flight: one
  // thread at a time moves them, but not always the same one.
  /// Moves each unfinished transfer as far as it goes without waiting; true if anything moved.
  /// Transfers of one direction, peer and tag go in the order of `transfers`, which stays the same
  /// from call to call (finished ones leave, new ones come at the end). A transfer that is missing
  /// although it was not finished is given up.
  virtual bool progress(const std::vector<Transfer*>& transfers) = 0;
  /// Read before `progress`; the wait returns at once if mail has moved since.
  virtual std::uint32_t mail_ticket() const = 0;
  /// Waits at most `limit` for mail to move, for `wake_mail` or for a failure of the group.
  virtual void wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit) = 0;
  /// Ends a wait_for_mail of this process; any thread.
  virtual void wake_mail() noexcept = 0;
  /// This rank sends no messages any more: peers on other hosts learn that nothing follows.
  virtual void finish_messages() noexcept {}
  /// Whatever `rank` sent before it left has been looked at.
  virtual bool has_read_all([[maybe_unused]] int rank) const { return true; }

  /// Becomes readable when on_network must be called; -1 where there is no network.
  virtual int network_fd() const { return -1; }
  virtual void on_network() noexcept {}
  /// Why the network does not carry what this rank and others send each other, if it does not; to
  /// be asked about twice a second, by one thread.
  virtual std::optional<GroupFailure> look_at_network([[maybe_unused]] std::int64_t now_ns) {
    return std::nullopt;
  }

  /// Bytes in the arena of a rank of this host, as mapped here; null where not all ranks are here.
  /// Throws PeerError, and poisons the group, if the range is not in that arena.
  virtual std::byte* memory_of([[maybe_unused]] int rank, [[maybe_unused]] std::uint64_t offset,
                               [[maybe_unused]] std::uint64_t bytes) {
    return nullptr;
  }

  /// Poisons the group: wakes every waiter of this process. The first failure is kept.
  virtual void fail(GroupFailure failure) noexcept = 0;
  virtual std::optional<GroupFailure> failure() const = 0;
  /// Throws the kept failure as PeerError, TimeoutError or StateError, with the call that met it if
  /// one did; returns if there is none.
  virtual void throw_if_failed(const CommCall* call = nullptr) const = 0;

  /// What a rank posted last, for messages about it: "all_reduce #42 float32 [8]" or "nothing yet".
  virtual std::string last_call_of(int rank) const = 0;
  /// Number of the collective that a rank began last, 0 before the first; nullopt where this rank
  /// cannot know.
  virtual std::optional<std::uint64_t> last_sequence_of([[maybe_unused]] int rank) const {
    return std::nullopt;
  }

  /// Adds the time that this rank has spent in long waits of collectives to `by_rank` (of the
  /// group), under the rank that came last.
  virtual void add_waits([[maybe_unused]] std::vector<std::int64_t>& by_rank) const {}

  /// Shows the ranks of this host that the process runs; one thread.
  virtual void beat() noexcept {}
  /// Beats of a rank of this host so far; nullopt for the others.
  virtual std::optional<std::uint64_t> beats_of([[maybe_unused]] int rank) const {
    return std::nullopt;
  }
};

}  // namespace libddp
