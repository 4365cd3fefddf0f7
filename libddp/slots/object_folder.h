#pragma once

// The snapshots of a training as objects behind an address (ObjectStore):
//
//   step-700.12/index.json                      whole: see snapshot_index.h
//   step-700.12/rank-0-of-2.4f2a.safetensors    what rank 0 stored, in the start 4f2a of the job
//   step-800.13/rank-0-of-2.4f2a.safetensors    being written: there is no index
//   step-800.13/rank-0.4f2a.json                this rank's part of the index
//   run                                         which job it is
//
// NOTE [Order of a commit of objects]
// Objects cannot be renamed, but each appears as a whole. So data comes first, under names that no
// other start of the job has, then the parts of the index, then index.json: that is the commit. A
// snapshot that goes loses its index first. Whoever sees an index has all that it names.
// Thread rule and errors: as SnapshotStore.
//
//   ObjectFolder folder(objects);
//   folder.list();

#include <memory>
#include <string>
#include <vector>

#include "libddp/slots/object_store.h"
#include "libddp/slots/snapshot_store.h"

namespace libddp {

class ObjectFolder final : public SnapshotStore {
 public:
  explicit ObjectFolder(std::shared_ptr<ObjectStore> objects);

  std::vector<Entry> list() const override;
  std::vector<Part> unfinished() const override;
  SnapshotIndex read(const Entry& entry) const override;
  std::shared_ptr<const ChunkSource> source(const Entry& entry,
                                            const StoredRank& rank) const override;
  void add_rank(const SavedStep& saved, const std::string& start, int rank, int world_size,
                const ChunkSource& source, const std::string& values) override;
  std::vector<int> missing_ranks(const SavedStep& saved, const std::string& start,
                                 int world_size) const override;
  Entry commit(const SavedStep& saved, const std::string& start, int world_size) override;
  void keep_newest(int count, const std::string& start) override;
  /// The name of the job that stores here; empty where there is none and `may_create` is not given.
  std::string run(bool may_create);

 private:
  std::string path_of(const SavedStep& saved) const;
  std::string text_of(const std::string& name) const;
  void write_text(const std::string& name, const std::string& text);

  const std::shared_ptr<ObjectStore> objects_;
};

}  // namespace libddp
