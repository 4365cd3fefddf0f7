#pragma once

// What a snapshot on disk consists of, as index.json says it: files with their checksums, and the
// values of each rank. The text has a checksum of its own, as there is none beside it.
// Thread rule: value.
//
//   const SnapshotIndex index = SnapshotIndex::decode(text);
//   const FileSource file(folder + "/" + index.ranks[0].file, index.ranks[0].stored);

#include <string>
#include <string_view>
#include <vector>

#include "libddp/slots/slot.h"
#include "libddp/slots/stored_file.h"

namespace libddp {

/// What a rank has stored.
struct StoredRank {
  int rank = 0;
  /// Name of its file in the folder of the snapshot.
  std::string file;
  StoredFile stored;
  /// JSON of what is no tensor.
  std::string values = "null";

  std::string encode() const;
  /// Throws SnapshotError with a clause about what is wrong.
  static StoredRank decode(std::string_view text);
};

struct SnapshotIndex {
  SavedStep saved;
  /// One for each rank that stored something, by rank.
  std::vector<StoredRank> ranks;
  int world_size = 0;

  std::string encode() const;
  static SnapshotIndex decode(std::string_view text);
};

}  // namespace libddp
