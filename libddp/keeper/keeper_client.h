#pragma once

// A process's connection to the keeper of its job. Errors: SnapshotError for what the keeper
// refuses, NetworkError where it is not there (any more), TimeoutError.
// Thread rule: one thread at a time.
//
//   KeeperClient keeper("job 7", {.is_worker = true, .agent = getppid()}, deadline);
//   keeper.put(memory, std::nullopt);
//   for (UniqueFd& fd : keeper.get()) SlotMemory::open(std::move(fd));

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/keeper/keeper_message.h"
#include "libddp/slots/slot_memory.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {

class KeeperClient {
 public:
  struct Role {
    /// A process of the job: it keeps the keeper alive, and ends when its agent dies.
    bool is_worker = false;
    /// Process that started it; 0 for none.
    pid_t agent = 0;
    /// Of the job, as which it has what the keeper holds for itself; -1: none (a command line).
    int rank = -1;
    /// Which of the hosts that share this machine: keeper_name().
    std::string host = {};
  };

  /// Throws NetworkError if no keeper of the run is there, and SnapshotError, at the deadline, if
  /// another living process is the worker of that rank.
  KeeperClient(const std::string& run, const Role& role, Deadline deadline);

  void put(const SlotMemory& memory, const std::optional<KeeperStorage>& storage);
  /// Also the replicas: memories of ranks that are not on this host.
  std::vector<UniqueFd> get();
  /// REQUIRES a slot that is whole. It is held while it is read; a writer that overwrites it before
  /// stores the newer save instead.
  void store(const SlotMemory& memory, int slot, const KeeperStorage& storage);
  /// Until the save, or a newer one, of the rank is stored. Throws SnapshotError if it could not
  /// be.
  void wait(int rank, std::uint64_t sequence, Deadline deadline);
  /// Whether that, or a newer one, of the rank is stored, or nothing of it is being stored any
  /// more.
  bool is_done(int rank, std::uint64_t sequence);
  /// JSON: see docs/design.md.
  std::string status();
  /// The rank has reached the end of the job: its memory is not kept.
  void finish();
  /// Begins to store the newest save that all ranks of this host have whole; wait() for each of
  /// them. Returns JSON: which save, of which ranks, where. Throws SnapshotError if there is none,
  /// if its ranks are about to write it each time until the deadline, or if the job stores in no
  /// folder.
  std::string store_newest(Deadline deadline);
  /// It has closed the connection: it has ended.
  bool is_gone() const { return is_closed(socket_.get()); }
  /// The save is whole on all ranks of the job. Does not wait for the keeper, which may be short of
  /// CPU time while the ranks train.
  void complete(std::uint64_t sequence);

  /// Lets keepers of other hosts that have this key pull saves from here; returns where they find
  /// it: "10.0.0.1:4711". `where`: an address or interface of this host, empty: the one on its
  /// default route.
  std::string listen(const std::string& where, const RunKey& key);
  /// Begins to fetch a save of a rank from the keeper that listens at `address`. REQUIRES listen().
  void pull(const std::string& address, int rank, std::uint64_t generation, std::uint64_t sequence,
            PullPurpose purpose = PullPurpose::Replica);
  /// How far that is: the worst of these ranks.
  Pulled pulled(const std::vector<int>& ranks, std::uint64_t generation, std::uint64_t sequence);
  /// Until that save, or a newer one in that memory, of the rank is here. Throws SnapshotError if
  /// it cannot be had.
  void wait_pull(int rank, std::uint64_t generation, std::uint64_t sequence, Deadline deadline);

 private:
  /// Whether the keeper has taken this process in; false: not yet, for the reason in `refusal`.
  bool greet(const std::string& name, const KeeperRequest& hello, Deadline deadline,
             std::string& refusal);
  void wait_for(KeeperRequest::Call call, int rank, std::uint64_t generation,
                std::uint64_t sequence, Deadline deadline);
  Frame exchange(const KeeperRequest& request, const std::vector<int>& descriptors,
                 Deadline deadline);

  std::string run_;
  UniqueFd socket_;
  int rank_ = -1;
};

}  // namespace libddp
