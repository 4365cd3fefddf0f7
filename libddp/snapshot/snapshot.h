#pragma once

// Snapshots of a training: in memory that outlives the processes (keeper/keeper.h) and, behind the
// training, in a folder; loaded from the newest place that is whole, by any number of ranks.
//
// A save copies into the older of two slots, with checksums, and is done when all ranks are: at
// every moment one save is whole on all of them, wherever a process dies. With replicas there is a
// spare slot (slot_turns.h), so that one is whole on any hosts but one, too. Loading checks each
// byte on its way; where one is damaged the next older save is taken: another slot, then the
// folder. Thread rule: save, load, versions, read, wait and close are collectives of the group, in
// the order of its other ones; any thread, one at a time. Errors: where one rank fails, all do, and
// the save before it stays. ArgumentError for what a caller has to change, SnapshotError for what
// is damaged or cannot be stored, StateError without memory or keeper, and what the group throws.
//
//   auto snapshot = libddp::Snapshot::create(group, {.folder = "out/run"});
//   std::string values;
//   int64_t step = snapshot->load(tensors, &values).value_or(0);   // fills the tensors in place
//   for (; step < 1000; ++step) {
//     train();
//     snapshot->save(step + 1, tensors, R"({"lr": 0.1})",
//                    step % 100 == 0 ? libddp::Storage::Folder : libddp::Storage::Memory);
//   }
//   snapshot->close();

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libddp/base/process.h"
#include "libddp/group/process_group.h"
#include "libddp/snapshot/snapshot_tensor.h"

namespace libddp {

class HostSaves;
class JobRanks;
class OwnPieces;
class RankMemory;
class ReadyPages;
class SavedVersion;
class SnapshotStore;
struct KeeperStorage;
struct RemoteStorage;
struct SavedStep;

enum class Storage { Memory, Folder };

struct SnapshotOptions {
  /// All ranks see it, and it is the job's alone; empty: memory only.
  std::string folder = {};
  /// `folder` is an address of objects ("s3://bucket/run"), and this reaches it; null: a folder.
  std::shared_ptr<const RemoteStorage> remote = {};
  /// Snapshots that stay in it.
  int keep = 2;
  /// False: nothing is kept in memory and no keeper is there; saves are in the folder when save()
  /// returns, one chunk at a time on their way.
  bool in_memory = true;
  /// 1: the next host's keeper gets copies of saves, behind the training, so that a job that loses
  /// a host goes on from the newest that has arrived there; all do unless they come faster than
  /// they are copied, which takes memory for a third one. Needs a run key (docs/security.md) and
  /// several hosts.
  int replicas = 0;
  /// Which job this is, so that its next start finds its memory: letters, digits, '-' and '_', at
  /// most 40. Empty: the folder says it; without one the launcher (TORCHELASTIC_RUN_ID,
  /// SLURM_JOB_ID), else the process that started this one.
  std::string run = {};
  /// So long the memory stays when nobody of the job is there.
  std::chrono::milliseconds linger{60'000};
  /// Threads that copy in each rank; 0: the cores of this process, shared out over the host's
  /// ranks.
  int num_threads = 0;
};

class Snapshot {
 public:
  using Options = SnapshotOptions;

  /// What a save was.
  struct Report {
    std::int64_t step = 0;
    /// Bytes of this rank.
    std::uint64_t bytes = 0;
    /// How long the training stood still for it.
    std::chrono::nanoseconds stall{};
    /// It goes into the folder.
    bool is_stored = false;
  };

  /// `group` null: alone. A collective.
  static std::shared_ptr<Snapshot> create(Group group, Options options = {});
  ~Snapshot();

  /// `values`: JSON of this rank, of at most 64 MiB and 32 levels. `step` is the same on all ranks.
  /// With Storage::Folder it is stored behind the training; where the disk is slower than the
  /// saves, a newer one takes its place.
  Report save(std::int64_t step, const std::vector<SnapshotTensor>& tensors,
              std::string_view values = "null", Storage storage = Storage::Memory);
  /// The step of the newest save that is whole; nothing, and prepare(), where there is none. One
  /// that is damaged is named in the log, and the next older one taken. Throws SnapshotError if
  /// there are some and none can be loaded, with what is wrong with each; ArgumentError if the
  /// newest has other keys, shapes or dtypes, which has changed nothing.
  std::optional<std::int64_t> load(const std::vector<SnapshotTensor>& tensors,
                                   std::string* values = nullptr);

  // The same in steps, for tensors whose shapes the values tell.
  /// `take` opens and reads a version; the newest one that it can take is the one that is loaded,
  /// as above. Nothing, without prepare(), where there is none.
  std::optional<std::int64_t> load_newest(const std::function<void(SavedVersion&)>& take);
  /// The newest first; at one step memory goes before the folder.
  std::vector<std::shared_ptr<SavedVersion>> versions();
  /// Throws SnapshotError on all ranks if it is damaged on one: the next one may do.
  void open(SavedVersion& version);
  /// Fills the tensors, and goes on from there: the next save is newer than every one that is
  /// known.
  void read(SavedVersion& version, const std::vector<SnapshotTensor>& tensors);

  /// The first save takes several times as long as later ones, as the kernel has to clear its
  /// pages. This starts the keeper and begins with that behind the training, for a save of tensors
  /// as large as these: they need not be the same. Nothing where this job has such a memory. What
  /// fails, or two copies that do not fit, is the save's to say; here it is a line in the log. A
  /// collective.
  void prepare(const std::vector<SnapshotTensor>& tensors);
  /// Of what prepare() has begun, until the next save.
  std::uint64_t prepared_bytes();

  /// Until the newest save for the folder is in it. Throws TimeoutError after `timeout`.
  void wait(std::chrono::milliseconds timeout = std::chrono::minutes(30));
  /// The job has reached its end: nothing is kept in memory; what is being stored is stored. Saves
  /// and loads throw StateError from then on.
  void close();

  const Options& options() const { return options_; }
  int rank() const;
  /// For what goes into a save and comes out of one: where `work` throws on one rank, it throws on
  /// all, its own error there, else one that says which rank failed, in `what`, and of what. A
  /// collective.
  void together(const std::string& what, const std::function<void()>& work) const;
  /// Of the keeper, as JSON: docs/snapshots.md. No collective. "null" where there is none yet.
  std::string status();

 private:
  Snapshot(std::unique_ptr<const JobRanks> ranks, Options options);

  /// Where a save goes, the same on all ranks.
  struct SavePlace {
    int slot = 0;
    /// One that is to be stored and has not been yet lies there.
    bool replaces_storing = false;
  };
  using Numbers = std::vector<std::vector<std::int64_t>>;
  using Versions = std::vector<std::shared_ptr<SavedVersion>>;

  void check_process() const;
  void check_open() const;
  /// Meets the keeper, and learns what there is. False where there is nothing yet and `may_create`
  /// is not given.
  bool join(bool may_create);
  std::string find_run(bool may_create) const;
  void learn_of(const std::vector<std::string>& told);
  /// Newer than all that are known, and nobody else's: ranks that do not see each other draw other
  /// starts.
  std::uint64_t next_generation() const;
  /// Of this start, in memory.
  std::uint64_t start_number() const;
  int num_threads() const;
  KeeperStorage storage() const;
  /// REQUIRES a folder.
  std::shared_ptr<SnapshotStore> store() const;
  std::uint64_t newest_in_folder();
  SavePlace agree_on_place(const std::string& what, std::int64_t step, const OwnPieces& own,
                           std::size_t values_bytes);
  /// Whether all hosts have memory for the spare slot. A collective.
  bool may_use_spare(const std::string& what);
  void make_memory(const std::string& what, const OwnPieces& own, std::size_t values_bytes,
                   const Numbers& offers);
  /// The sum of a number over the ranks of a host.
  std::uint64_t on_host(const Numbers& numbers, std::size_t index, int host) const;
  /// Of this host.
  std::uint64_t on_host(const Numbers& numbers, std::size_t index) const;
  Versions find_versions();
  Versions versions_in_memory();
  Versions versions_in_folder();
  /// On this rank; and, of a save in memories, with the keys that are on other hosts only.
  void open_everywhere(SavedVersion& version, const std::string& what);
  void go_on_from(const SavedVersion& version);

  const std::unique_ptr<const JobRanks> ranks_;
  const Options options_;
  /// Of this start, in names of files.
  std::string start_;
  /// Null until it has met the keeper.
  std::unique_ptr<RankMemory> memory_;
  /// Of prepare(), until a save takes them.
  std::unique_ptr<ReadyPages> ready_;
  /// The newest that any rank knows of.
  std::uint64_t sequence_ = 0;
  std::uint64_t generation_ = 0;
  bool has_warned_of_spare_ = false;
  bool is_closed_ = false;
  const std::unique_ptr<HostSaves> host_saves_;
  const ProcessStamp made_;
  std::mutex mutex_;
};

}  // namespace libddp
