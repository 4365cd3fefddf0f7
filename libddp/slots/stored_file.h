#pragma once

// The bytes of a rank as a file of safetensors: 8 bytes that count the header, the layout's text
// with spaces up to the next block of a disk, the data. Its checksums stand beside it (StoredFile),
// as safetensors has no place for them.
//
// Writing: the space is taken first, so that a full disk shows before a byte is written; each chunk
// is checked against its checksum on its way, so that what memory has damaged is not stored; the
// file has its name only when the disk has its bytes (FreshFile).
// Thread rule: free functions and immutable values; any thread. One writer per path.
//
//   const StoredFile file = write_stored_file("out/rank-0-of-2.safetensors", SlotSource(memory,
//   0)); const FileSource same("out/rank-0-of-2.safetensors", file); verify(same);

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "libddp/slots/chunk_source.h"

namespace libddp {

/// What is known of a file beside it.
struct StoredFile {
  std::uint64_t bytes = 0;
  /// CRC32C of the 8 bytes and the layout's text.
  std::uint32_t header_sum = 0;
  /// CRC32C of each chunk of the data.
  std::vector<std::uint32_t> chunk_sums;

  bool operator==(const StoredFile&) const = default;
};

/// Writes beside `path`, then renames; the folder is synchronised too. Throws SnapshotError with
/// the path and the system's reason (for a full disk with the bytes that are missing), or if the
/// source is damaged; then nothing of it is left.
StoredFile write_stored_file(const std::string& path, const ChunkSource& source);

/// The same bytes to wherever `append` brings them, each chunk checked on its way; it is told
/// whether they stay as long as the source. `path`: for messages. Throws SnapshotError if the
/// source is damaged.
StoredFile send_stored(const std::string& path, const ChunkSource& source,
                       const std::function<void(std::span<const std::byte>, bool)>& append);

/// Throws SnapshotError: the file at `path` cannot be used, for that reason.
[[noreturn]] void refuse_stored_file(const std::string& path, const std::string& why);

/// Such bytes, wherever they are.
class StoredSource : public ChunkSource {
 public:
  /// Fills `bytes` at `to` from `offset` on, or throws SnapshotError; by several threads at once.
  using Read = std::function<void(void* to, std::uint64_t bytes, std::uint64_t offset)>;

  /// Reads the header. Throws SnapshotError if it is another one than `known`, or none of ours.
  StoredSource(std::string path, StoredFile known, Read read);

  const PieceLayout& layout() const override { return layout_; }
  std::uint32_t checksum(std::size_t index) const override { return known_.chunk_sums[index]; }
  std::span<const std::byte> chunk(std::size_t index,
                                   std::vector<std::byte>& scratch) const override;
  std::string name() const override { return path_; }

 private:
  const std::string path_;
  const StoredFile known_;
  const Read read_;
  std::uint64_t data_begin_ = 0;
  PieceLayout layout_;
};

class FileSource final : public StoredSource {
 public:
  /// Throws as StoredSource does, and for a file that is missing or has another size.
  FileSource(const std::string& path, StoredFile known);
};

}  // namespace libddp
