#pragma once

// A user's folder with the snapshots of a training:
//
//   step-700.12/                  the snapshot of step 700, the 12th save: whole
//     index.json                  see snapshot_index.h
//     rank-0-of-2.safetensors     what rank 0 stored
//   step-800.13.4f2a.part/        one that is being written, by the start of the job named 4f2a
//     rank-0-of-2.safetensors
//     rank-0.json                 this rank's part of the index: its file is on the disk
//
// NOTE [Order of a commit]
// Every rank writes its file, then its part of the index. Who commits waits until all parts are
// there, writes index.json, and renames the folder: a snapshot has its name when the disk has all
// of it, so whoever sees the name can load it, whatever died before. Names of a job that died
// differ from those of its next start, so that no two starts write one snapshot. Older ones are
// removed behind the commit. Errors are SnapshotErrors with the path and the system's reason.
// Thread rule: one at a time per rank; of all ranks and hosts one commits.
//
//   SnapshotFolder folder("out/run");
//   folder.add_rank({.step = 800, .sequence = 13}, "4f2a", 0, 2, source, values);   // each rank
//   if (folder.missing_ranks(saved, "4f2a", 2).empty()) folder.commit(saved, "4f2a", 2);
//   folder.keep_newest(2, "4f2a");

#include <string>
#include <vector>

#include "libddp/slots/chunk_source.h"
#include "libddp/slots/slot.h"
#include "libddp/slots/snapshot_index.h"

namespace libddp {

class SnapshotFolder {
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

  explicit SnapshotFolder(std::string path);

  /// By sequence, the newest first. A folder that is not there has none.
  std::vector<Entry> list() const;
  /// What is no snapshot yet, or not any more; by sequence, the newest first.
  std::vector<Part> unfinished() const;
  SnapshotIndex read(const Entry& entry) const;
  /// The bytes of one rank of it.
  FileSource open(const Entry& entry, const StoredRank& rank) const;

  /// `start`: letters and digits, of the start of the job, equal on all ranks.
  void add_rank(const SavedStep& saved, const std::string& start, int rank, int world_size,
                const ChunkSource& source, const std::string& values);
  std::vector<int> missing_ranks(const SavedStep& saved, const std::string& start,
                                 int world_size) const;
  /// REQUIRES missing_ranks() empty.
  Entry commit(const SavedStep& saved, const std::string& start, int world_size);
  /// Removes older snapshots than the newest `count`, and what is unfinished of other starts or
  /// older than the newest.
  void keep_newest(int count, const std::string& start);

 private:
  std::string part_path(const SavedStep& saved, const std::string& start) const;

  const std::string path_;
};

}  // namespace libddp
