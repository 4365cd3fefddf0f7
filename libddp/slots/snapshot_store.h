#pragma once

// Where the snapshots of a training are stored, whatever it is: a folder (SnapshotFolder) or
// objects behind an address (ObjectFolder). Each rank adds its part, one of them commits when all
// parts are there; from then on, and not before, it is a snapshot. Errors are SnapshotErrors with
// the place and the reason. Thread rule: one at a time per rank; of all ranks and hosts one
// commits.
//
//   store->add_rank({.step = 800, .sequence = 13}, "4f2a", 0, 2, source, values);   // each rank
//   if (store->missing_ranks(saved, "4f2a", 2).empty()) store->commit(saved, "4f2a", 2);
//   store->keep_newest(2, "4f2a");

#include <memory>
#include <string>
#include <vector>

#include "libddp/slots/chunk_source.h"
#include "libddp/slots/slot.h"
#include "libddp/slots/snapshot_index.h"

namespace libddp {

class SnapshotStore {
 public:
  /// One that is whole.
  struct Entry {
    SavedStep saved;
    std::string path;
  };

  /// One that is being written, or that a start of the job has left so when it died.
  struct Part {
    SavedStep saved;
    std::string start;
    std::string path;
  };

  virtual ~SnapshotStore() = default;

  /// By sequence, the newest first. A place that is not there has none.
  virtual std::vector<Entry> list() const = 0;
  /// What is no snapshot yet, or not any more; by sequence, the newest first.
  virtual std::vector<Part> unfinished() const = 0;
  virtual SnapshotIndex read(const Entry& entry) const = 0;
  /// The bytes of one rank of it.
  virtual std::shared_ptr<const ChunkSource> source(const Entry& entry,
                                                    const StoredRank& rank) const = 0;

  /// `start`: letters and digits, of the start of the job, equal on all ranks.
  virtual void add_rank(const SavedStep& saved, const std::string& start, int rank, int world_size,
                        const ChunkSource& source, const std::string& values) = 0;
  virtual std::vector<int> missing_ranks(const SavedStep& saved, const std::string& start,
                                         int world_size) const = 0;
  /// REQUIRES missing_ranks() empty.
  virtual Entry commit(const SavedStep& saved, const std::string& start, int world_size) = 0;
  /// Removes older snapshots than the newest `count`, and what is unfinished of other starts or
  /// older than the newest.
  virtual void keep_newest(int count, const std::string& start) = 0;
};

}  // namespace libddp
