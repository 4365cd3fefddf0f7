#pragma once

// One save that can be loaded: in the memories of this host's ranks, or stored.
// Thread rule: one thread.
//
//   for (const auto& version : snapshot.versions()) version->name();   // "memory, step 700"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "libddp/slots/slot_memory.h"
#include "libddp/slots/snapshot_store.h"

namespace libddp {

class SavedVersion {
 public:
  /// A slot of one of the ranks.
  struct Place {
    std::shared_ptr<SlotMemory> memory;
    int slot = 0;
  };
  /// REQUIRES find_places() before open().
  static SavedVersion in_memory(const SavedStep& saved, int world_size, std::uint64_t generation);
  static SavedVersion on_storage(std::shared_ptr<const SnapshotStore> store,
                                 SnapshotStore::Entry entry);

  const SavedStep& saved() const { return saved_; }
  bool is_in_memory() const { return !entry_; }
  bool is_open() const { return is_open_; }
  /// Of the ranks that saved it; known when it is open.
  int world_size() const { return world_size_; }
  std::string name() const;

  /// Reads what it has; nothing where that is done. Throws SnapshotError for files that are missing
  /// or damaged.
  void open(int rank);
  /// JSON that `rank` of open() saved; that of the lowest one where the job had fewer ranks.
  const std::string& values() const { return values_; }
  /// A piece of each key, of which shape and dtype hold for all of them.
  const std::map<std::string, Piece>& pieces() const { return pieces_; }
  /// They as text, and what other hosts say of theirs: a host may have a part of a save.
  std::string piece_text() const;
  void add_pieces(const std::string& text);
  /// What this host has of it, open.
  const std::vector<std::shared_ptr<const ChunkSource>>& sources() const { return sources_; }
  const std::vector<Place>& places() const { return places_; }
  /// Of the memories; 0 on storage.
  std::uint64_t generation() const { return generation_; }
  /// What this host has of it: all slots of it among those memories. It has to be opened again.
  void find_places(const std::vector<std::shared_ptr<SlotMemory>>& memories);

 private:
  void add_source(std::shared_ptr<const ChunkSource> source);

  SavedStep saved_;
  int world_size_ = 0;
  std::uint64_t generation_ = 0;
  std::vector<Place> places_;
  std::shared_ptr<const SnapshotStore> store_;
  std::shared_ptr<SnapshotStore::Entry> entry_;
  std::vector<std::shared_ptr<const ChunkSource>> sources_;
  std::map<std::string, Piece> pieces_;
  std::string values_;
  bool is_open_ = false;
};

}  // namespace libddp
