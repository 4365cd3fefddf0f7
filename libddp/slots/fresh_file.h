#pragma once

// A file that has its name only when the disk has all of its bytes; until then it is `path` with
// ".part", and goes away. What is written goes to the disk at once and is not kept in memory, which
// belongs to the training. Thread rule: one thread; one writer per path.
//
//   FreshFile file("out/rank-0.safetensors");
//   file.reserve(head.size() + data.size());
//   file.append(head, /*stays=*/false);
//   file.append(data, /*stays=*/true);
//   file.put_in_place();

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "libddp/base/unique_fd.h"
#include "libddp/slots/direct_writer.h"

namespace libddp {

/// All members throw SnapshotError with the path and the system's reason, for a full disk with the
/// bytes that are missing.
class FreshFile {
 public:
  explicit FreshFile(const std::string& path);
  FreshFile(const FreshFile&) = delete;
  FreshFile& operator=(const FreshFile&) = delete;
  ~FreshFile();

  /// Takes the space, where the file system can: elsewhere the disk is found full when it is. Takes
  /// none where it is too little.
  void reserve(std::uint64_t bytes);
  /// Fast in large pieces that begin where a multiple of DirectWriter::kBlockBytes does. The bytes
  /// may go when it returns, unless they stay until the file is in place, or is no more.
  void append(std::span<const std::byte> bytes, bool stays);
  void put_in_place();

 private:
  void append_to_cache(std::span<const std::byte> bytes);
  void hand_over(std::uint64_t begin, std::uint64_t end);
  [[noreturn]] void refuse(const char* call, int error);

  const std::string path_;
  const std::string fresh_;
  UniqueFd fd_;
  std::uint64_t wanted_bytes_ = 0;
  std::uint64_t written_ = 0;
  /// Of those in the page cache.
  std::uint64_t handed_over_ = 0;
  std::optional<DirectWriter> direct_;
};

/// Throws SnapshotError with the path, the reason and what to do.
[[noreturn]] void refuse_file(const std::string& path, const std::string& why, const char* hint);

/// Makes the names in a folder survive a loss of power. Throws SnapshotError.
void sync_folder(const std::string& path);

}  // namespace libddp
