#pragma once

// One sealed memfd mapped into this process: memory that other processes can map too.
//
// There is no name in a file system: the kernel frees the pages when the last process that holds
// the descriptor or a mapping is gone, SIGKILL included, so nothing can be left in /dev/shm.
// Size is fixed and sealed (no shrink, no grow), so a peer cannot make this process fault.
// Pages cost memory when they are first touched, not when they are reserved.
// Thread rule: immutable after construction.
//
//   SharedSegment mine = SharedSegment::create("libddp-arena", 64u << 20);
//   SharedSegment theirs = SharedSegment::map(std::move(fd_from_peer));

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "libddp/base/unique_fd.h"

namespace libddp {

class SharedSegment {
 public:
  SharedSegment() = default;
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  /// Creates and maps `size_bytes` of zeros; `name` shows in /proc/PID/maps.
  /// Huge pages are asked for (madvise), core dumps leave it out.
  static SharedSegment create(const std::string& name, std::size_t size_bytes);
  /// As create, of a size that seal_at() makes final, before any other process gets it.
  static SharedSegment reserve(const std::string& name, std::size_t size_bytes);
  /// Cuts a reserved segment; the pages that it has stay. REQUIRES no more than was reserved.
  void seal_at(std::size_t size_bytes);
  /// Maps a segment that another process created. Throws NetworkError if it is not sealed memory.
  static SharedSegment map(UniqueFd fd);

  /// Descriptor and offset of bytes that lie in a segment of this process, which keeps both.
  struct Place {
    int fd = -1;
    std::uint64_t offset = 0;
  };
  static std::optional<Place> find(const void* pointer, std::size_t size_bytes);

  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }
  int fd() const { return fd_.get(); }
  /// Whether the descriptor is of this segment, however often either was passed on.
  bool is_behind(int fd) const;

 private:
  SharedSegment(UniqueFd fd, std::byte* data, std::size_t size_bytes);
  void seal();
  void unmap();

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

}  // namespace libddp
