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
  };

  /// Throws NetworkError if no keeper of the run is there, and SnapshotError, at the deadline, if
  /// another living process is the worker of that rank.
  KeeperClient(const std::string& run, const Role& role, Deadline deadline);

  void put(const SlotMemory& memory, const std::optional<KeeperStorage>& storage);
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
  /// It has closed the connection: it has ended.
  bool is_gone() const { return is_closed(socket_.get()); }
  /// The save is whole on all ranks of the job.
  void complete(std::uint64_t sequence);

 private:
  /// Whether the keeper has taken this process in; false: not yet, for the reason in `refusal`.
  bool greet(const KeeperRequest& hello, Deadline deadline, std::string& refusal);
  Frame exchange(const KeeperRequest& request, const std::vector<int>& descriptors,
                 Deadline deadline);

  UniqueFd socket_;
  int rank_ = -1;
};

}  // namespace libddp
