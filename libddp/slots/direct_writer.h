#pragma once

// Writes large pieces of a file past the page cache (O_DIRECT), two at a time: the disk has always
// something to do, no bytes are copied, and the training keeps its memory and the cores that would
// copy. A piece that the file system does not take that way is written in the ordinary way, and
// is_usable() is false from then on. Thread rule: one thread, which waits in write() and finish().
//
//   DirectWriter writer("out/rank-0.part", fd);
//   if (writer.is_usable()) writer.write(bytes, /*offset=*/4096, /*stays=*/true);
//   if (const int error = writer.finish()) ...

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/unique_fd.h"

namespace libddp {

class DirectWriter {
 public:
  /// Of what places in the file and numbers of bytes are multiples.
  static constexpr std::size_t kBlockBytes = 4096;

  /// `fd` is the same file, opened in the ordinary way, until the writer ends.
  DirectWriter(const std::string& path, int fd);
  /// Waits for what is on its way.
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  bool is_usable() const { return is_usable_.load(std::memory_order_relaxed); }
  /// Begins. The bytes may go when it returns, unless they stay as they are until finish() has
  /// returned or the writer has ended. REQUIRES whole blocks.
  void write(std::span<const std::byte> bytes, std::uint64_t offset, bool stays);
  /// Waits for all; the errno of the first that failed, or 0.
  int finish();
  /// So far.
  int error() const { return error_.load(std::memory_order_relaxed); }

 private:
  struct Free {
    void operator()(std::byte* buffer) const;
  };
  /// Aligned as the disk wants it.
  struct Buffer {
    std::unique_ptr<std::byte[], Free> bytes;
    std::size_t size = 0;
  };
  struct Piece {
    std::span<const std::byte> bytes;
    std::uint64_t offset = 0;
    /// What the bytes are in, if they were copied.
    Buffer buffer;
  };

  Buffer copy(std::span<const std::byte> bytes);
  void add_thread();
  void run();
  void store(const Piece& piece);

  const int fd_;
  const UniqueFd direct_;
  std::atomic<bool> is_usable_;
  std::atomic<int> error_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> waiting_;
  std::vector<Buffer> buffers_;
  /// Waiting, and being written.
  int num_pieces_ = 0;
  bool is_over_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace libddp
