#pragma once

// What processes of a job say to their host's keeper, and its answers: JSON in frames, with the
// memories as descriptors beside it. Thread rule: values.
//
//   KeeperRequest put{.call = KeeperRequest::Call::Put};
//   send_frame(socket, put.encode(), {memory.fd()}, deadline);
//   KeeperReply::decode(receive_frame(socket, kKeeperLimits, deadline).bytes).check();

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libddp/keeper/helper_objects.h"
#include "libddp/keeper/pull.h"
#include "libddp/slots/slot.h"
#include "libddp/transport/frame.h"

namespace libddp {

inline constexpr FrameLimits kKeeperLimits{.max_bytes = 1u << 20, .max_descriptors = 250};

/// Where the snapshots of a job are stored.
struct KeeperStorage {
  /// Or an address of objects.
  std::string folder;
  /// Of the start of the job: letters and digits.
  std::string start;
  /// So many snapshots stay.
  int keep = 2;
  /// This host's keeper commits (SnapshotFolder): the one of rank 0.
  bool commits = false;
  /// For an address in place of a folder: what brings objects there.
  StorageHelper helper = {};
};

struct KeeperRequest {
  enum class Call {
    /// First on a connection. `run`; `agent`: the process that started this one, 0 for none; a
    /// worker is a process that ends with its agent, and the only one of its `rank`, if it has one.
    Hello,
    /// One descriptor: a SlotMemory of `run`. `storage`: where the job stores, if it does.
    Put,
    /// The memories of all ranks of this host, then the replicas of those of other hosts.
    Get,
    /// Stores a slot of `rank`.
    Store,
    /// Answered when the slots of `rank` up to `sequence` are stored, or cannot be.
    Wait,
    Status,
    /// `rank` has reached the job's end: nothing of it needs to be kept.
    Finish,
    /// The save `sequence` is whole on all ranks of the job, on all hosts. Not answered.
    Complete,
    /// One descriptor: a key (keeper_key.h). From now on other hosts' keepers with this key may
    /// pull saves; `address`: see Replication::listen. Answers with the address and port.
    Listen,
    /// Begins to fetch the save `sequence` of `rank`, layout `generation`, from the keeper at
    /// `address`, for `purpose`.
    Pull,
    /// Answered when a save of `rank`, layout `generation`, from `sequence` on is here, or could
    /// not be pulled.
    WaitPull,
    /// Whether the save `sequence`, layout `generation`, of all of `ranks` is here: `pulled` of the
    /// reply.
    Pulled,
    /// Stores, for all ranks of the host, the newest save that they have whole, where the job
    /// stores. `status` of the reply says which, of which ranks, and where.
    StoreNewest,
  };

  Call call = Call::Status;
  std::string run = {};
  std::int64_t agent = 0;
  bool is_worker = false;
  /// Of the job; -1: none.
  int rank = -1;
  std::uint64_t generation = 0;
  int slot = 0;
  std::uint64_t sequence = 0;
  std::string address = {};
  PullPurpose purpose = PullPurpose::Replica;
  std::vector<int> ranks = {};
  std::optional<KeeperStorage> storage = {};

  std::string encode() const;
  /// Throws SnapshotError with a clause about what is wrong.
  static KeeperRequest decode(std::string_view text);
};

struct KeeperReply {
  /// Why it was not done; empty if it was.
  std::string error;
  /// Not done yet: what is in the way may be over in a moment.
  bool is_busy = false;
  /// Of Listen.
  std::string address = {};
  /// Of the call of that name.
  Pulled pulled = Pulled::Failed;
  /// Of Status and StoreNewest: JSON.
  std::string status = "null";

  std::string encode() const;
  static KeeperReply decode(std::string_view text);
  /// Throws SnapshotError with `error` unless that is empty.
  void check() const;
};

/// The keeper of a job listens under this name of the abstract namespace. `host`: which of the
/// hosts that share this machine; empty: what LIBDDP_HOST_ID says, if it says something.
std::string keeper_name(const std::string& run, const std::string& host = "");

}  // namespace libddp
