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
// removed behind the commit. Thread rule and errors: as SnapshotStore.
//
//   SnapshotFolder folder("out/run");
//   folder.add_rank({.step = 800, .sequence = 13}, "4f2a", 0, 2, source, values);   // each rank
//   if (folder.missing_ranks(saved, "4f2a", 2).empty()) folder.commit(saved, "4f2a", 2);
//   folder.keep_newest(2, "4f2a");

#include <memory>
#include <string>
#include <vector>

#include "libddp/slots/snapshot_store.h"

namespace libddp {

class SnapshotFolder final : public SnapshotStore {
 public:
  explicit SnapshotFolder(std::string path);

  std::vector<Entry> list() const override;
  std::vector<Part> unfinished() const override;
  SnapshotIndex read(const Entry& entry) const override;
  FileSource open(const Entry& entry, const StoredRank& rank) const;
  std::shared_ptr<const ChunkSource> source(const Entry& entry,
                                            const StoredRank& rank) const override {
    return std::make_shared<FileSource>(open(entry, rank));
  }
  void add_rank(const SavedStep& saved, const std::string& start, int rank, int world_size,
                const ChunkSource& source, const std::string& values) override;
  std::vector<int> missing_ranks(const SavedStep& saved, const std::string& start,
                                 int world_size) const override;
  Entry commit(const SavedStep& saved, const std::string& start, int world_size) override;
  void keep_newest(int count, const std::string& start) override;

 private:
  std::string part_path(const SavedStep& saved, const std::string& start) const;

  const std::string path_;
};

}  // namespace libddp
