#pragma once

// Stores slots in the background: one thread of the keeper, in the order of the requests. A rank
// whose newer slot waits skips its older one.
//
// A slot is held while its bytes are read; one that its writer has taken for a newer save meanwhile
// is skipped: the writer stores that one instead. The keeper of rank 0 commits a snapshot when
// the parts of all ranks are in the folder, whichever host stored them. An error is logged once and
// kept for whoever asks; the older snapshots stay. Where storage is an address, a helper brings the
// bytes there out of the slot, which is held as long: no copy of it is made on this host.
// Thread rule: any thread.
//
//   Persister persister([&] { wake_up(); });
//   persister.add({.memory = memory, .slot = 0, .saved = saved, .storage = storage});
//   persister.state(0).stored;        // of rank 0, when it is done

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "libddp/keeper/keeper_message.h"
#include "libddp/keeper/opened_storage.h"
#include "libddp/slots/slot_memory.h"

namespace libddp {

class Persister {
 public:
  struct Job {
    std::shared_ptr<SlotMemory> memory;
    int slot = 0;
    SavedStep saved;
    KeeperStorage storage;
    /// Keeps its writer away while the job waits; may be null.
    std::shared_ptr<void> hold = nullptr;
  };
  /// Of a rank.
  struct State {
    /// The newest that is stored: committed where this keeper commits.
    std::optional<SavedStep> stored;
    /// Of the newest that was asked for; empty if it did not fail.
    std::string error;
    /// Jobs that are not done.
    int num_waiting = 0;
  };

  /// `changed` is called, in the persister's thread, when a state has changed.
  explicit Persister(std::function<void()> changed);
  /// Finishes the job in progress, unless that is on its way to an address, and drops the others.
  ~Persister();

  void add(Job job);
  State state(int rank) const;
  bool is_idle() const;
  /// It is storing, and something has moved within `patience`; or what is stored at an address
  /// waits for parts of other hosts, not longer.
  bool is_moving(std::chrono::milliseconds patience) const;

 private:
  struct Commit {
    SavedStep saved;
    KeeperStorage storage;
    int world_size = 1;
    /// Of this host, those whose parts are stored.
    std::vector<int> ranks;
    /// Of one that could not: then there is nothing to commit.
    std::string error;
  };

  void run();
  void note_move() { moved_ = std::chrono::steady_clock::now().time_since_epoch().count(); }
  /// The next one; REQUIRES that there is one, and the mutex.
  Job take();
  void store(Job job);
  /// Its slot; waits where the writer has reserved that. False if another save is in there.
  bool hold(const Job& job);
  /// It is stored, or waits for the parts of other ranks.
  bool is_known(const Job& job) const;
  void commit_what_is_there();
  void await_commit(const Job& job, const std::string& error);
  void note_failure(const Commit& commit);
  void finish_superseded(int rank);
  void finish(int rank, const SavedStep& saved, const std::string& error);

  const std::function<void()> changed_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  std::map<int, State> states_;
  /// Of the persister's thread.
  std::vector<Commit> commits_;
  /// The last save that could not be stored, for the ranks that come to it later.
  Commit failed_;
  OpenedStorage opened_;
  bool is_stopping_ = false;
  /// A job is in progress.
  bool is_storing_ = false;
  /// The save of the job that began last: all ranks of this host store it before a newer one, or
  /// where storage is slower than the saves they would never store the same one.
  std::optional<SavedStep> current_;
  /// Commits at an address wait.
  bool is_awaiting_ = false;
  /// When a chunk was stored last, in the steady clock's units.
  std::atomic<std::chrono::steady_clock::rep> moved_{0};
  std::thread thread_;
};

}  // namespace libddp
