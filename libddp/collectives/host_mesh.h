#pragma once

// Collectives between the ranks of one group on one host, over memory that all of them map.
// Bytes in, bytes out: no tensors, no threads, no store.
//
// Words: *page* = the control page of a rank (slots with stamps, inline payload, staging, mail);
// *meet* = every rank has posted its slot for this sequence number and seen everyone else's;
// *slice* = the part of the buffer that a rank owns: it reduces its slice from all ranks' memory
// and stores the result into all ranks' memory ("slice-owner pass").
//
// Memory in the arena is read and written in place by the peers; other memory goes through the
// staging buffers in few large chunks; small payloads travel inside the slot (one meeting).
// Reductions run in rank order with fp32 accumulation for bf16 and fp16: results are bit-identical
// on every rank and from run to run, and for float32 sums on 2 ranks equal torch's.
//
// Waiting: a short spin only while the ranks have free cores, then a futex; every wait has a
// deadline. `fail` (from any thread) wakes all waiters; the first failure is kept and every later
// call throws the same cause.
//
// Thread rule: collectives of one mesh run one at a time, in the same order on all ranks (the
// caller serialises); `fail`, `failure` and the p2p calls may come from any thread at any time;
// send and recv are serialised by the caller among themselves.
//
//   HostMesh mesh({.rank = 0, .world_size = 2, .group_name = "world", .arena = arena}, ...);
//   mesh.all_reduce(call, data);

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/collectives/op_description.h"
#include "libddp/memory/arena.h"
#include "libddp/memory/shared_segment.h"

namespace libddp {

/// One rank as the mesh sees it. The mesh keeps the segments mapped.
struct MeshMember {
  pid_t pid = 0;
  std::string host;
  /// CPUs that this rank may run on, as text of the affinity mask; decides spinning.
  std::string cpu_mask;
  /// The rank's control page; for the own rank the one made by HostMesh::create_page.
  SharedSegment page;
  /// The rank's arena; empty for the own rank (see HostMeshOptions::arena).
  SharedSegment arena;
};

struct HostMeshOptions {
  int rank = 0;
  int world_size = 1;
  std::string group_name;
  std::shared_ptr<Arena> arena = nullptr;
  /// One per rank, ordered by rank.
  std::vector<MeshMember> members = {};
};

/// One collective of this rank.
struct MeshCall {
  OpDescription description;
  std::uint64_t sequence = 0;
  Deadline deadline = Deadline::never();
  /// Instead of `deadline`: counts from the moment at which the call first has to wait for long, so
  /// that a call that finds everyone there never reads the clock.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
};

/// Why the group cannot go on; thrown again by every later call.
struct MeshFailure {
  enum class Kind { Peer, Timeout, Aborted };
  Kind kind = Kind::Peer;
  std::string message;
  int peer_rank = -1;
  pid_t peer_pid = 0;
};

class HostMesh {
 public:
  explicit HostMesh(HostMeshOptions options);
  ~HostMesh();
  HostMesh(const HostMesh&) = delete;
  HostMesh& operator=(const HostMesh&) = delete;

  /// The control page that a rank makes before the meeting and passes to its peers.
  static SharedSegment create_page(const std::string& group_name, int world_size);
  /// This process's CPUs as text for MeshMember::cpu_mask.
  static std::string own_cpu_mask();
  /// Layout version and sizes: ranks with different ones must not form a mesh.
  static std::string layout();

  int rank() const;
  int world_size() const;

  // In each of these `call.description` says dtype, op, count and root; pointers may be any memory.
  // Errors: PeerError (a peer died, or called something else: both calls are named), TimeoutError
  // (names the ranks that did not come), StateError (aborted).

  /// In place over `count` elements. `scale` multiplies the result (1/p for Avg is the mesh's own).
  void all_reduce(const MeshCall& call, void* data, double scale = 1.0);
  /// `input` holds world_size blocks of `output_count` elements; the own block is reduced into
  /// `output`. They may overlap only if output is exactly the own block.
  void reduce_scatter(const MeshCall& call, const void* input, void* output,
                      std::uint64_t output_count, double scale = 1.0);
  /// `output` holds world_size blocks of `input_bytes`. `input` may be the own block in place.
  void all_gather(const MeshCall& call, const void* input, void* output, std::uint64_t input_bytes);
  void broadcast(const MeshCall& call, void* data, std::uint64_t bytes, int root);
  void barrier(const MeshCall& call);

  /// Point to point, through mail slots: blocks until the receiver has taken the bytes (send) or
  /// they have come (recv). Messages between two ranks with one tag arrive in order.
  /// `source` -1 = any. Returns the source rank. A size that differs throws on both sides.
  void send(const MeshCall& call, const void* data, std::uint64_t bytes, int target, int tag);
  int recv(const MeshCall& call, void* data, std::uint64_t bytes, int source, int tag);
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

    // Progress, kept by the mesh.
    std::uint64_t moved_bytes = 0;
    bool is_started = false;
    bool is_done = false;
    /// Rank that a finished receive came from.
    int source = -1;
    /// Number of the message on its channel.
    std::uint64_t message = 0;
  };
  void exchange(const MeshCall& call, std::vector<Transfer> transfers);

  // The pieces of `exchange`, for the group room's message lane, which keeps many isend/irecv in
  // flight: one thread at a time moves them, but not always the same one.
  /// Moves each unfinished transfer as far as it goes without waiting; true if anything moved.
  /// Transfers of one direction, peer and tag go in the order of `transfers`, which stays the same
  /// from call to call (finished ones leave, new ones come at the end). A transfer that is missing
  /// although it was not finished is given up.
  bool progress(const std::vector<Transfer*>& transfers);
  /// Read before `progress`; the wait returns at once if mail has moved since.
  std::uint32_t mail_ticket() const;
  /// Waits at most `limit` for mail to move, for `wake_mail` or for a failure of the group.
  void wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit);
  /// Ends a wait_for_mail of this process; any thread.
  void wake_mail() noexcept;

  /// Poisons the group: wakes every waiter of this process. The first failure is kept.
  void fail(MeshFailure failure) noexcept;
  std::optional<MeshFailure> failure() const;
  /// Throws the kept failure as PeerError, TimeoutError or StateError; returns if there is none.
  void throw_if_failed() const;

  /// What a rank posted last, for messages about it: "all_reduce #42 float32 [8]" or "nothing yet".
  std::string last_call_of(int rank) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace libddp
