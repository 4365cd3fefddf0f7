#pragma once

// The bytes of tensors, one behind the other, chunk by chunk: from their own memory where they are
// on the CPU, and from a device through a few places of page-locked memory. Tensors that are not
// dense are copied when their first chunk is taken, and let go of behind their last one.
//
// While the CPU copies a chunk out of its place, with its checksum, the next ones are on their way
// from the device (device_lines.h). So a save takes as long as the slower of the two and not both,
// and 64 MiB of page-locked memory however large the model is: pages take longer to lock than to
// copy, and torch's allocator keeps them.
//
// Thread rule: `copy` from several threads, each chunk once, and begun in the order of the chunks.
// The rest: one thread, whose current streams count.
//
//   StagedChunks chunks(own.in_order_of(layout));
//   for_each_chunk(num_chunks(chunks.total()), 2, [&](std::size_t i) {
//     sums[i] = chunks.copy(i, memory + i * kChunkBytes);
//   });

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "libddp/slots/chunk_parts.h"
#include "libddp/snapshot/device_lines.h"

namespace libddp {

class StagedChunks {
 public:
  /// The chunks before `first` are not asked for.
  explicit StagedChunks(const std::vector<at::Tensor>& tensors, std::size_t first = 0);
  StagedChunks(const StagedChunks&) = delete;
  StagedChunks& operator=(const StagedChunks&) = delete;

  std::uint64_t total() const { return parts_.total(); }
  /// Copies a chunk to `to` and returns its checksum. Throws what the device throws, to all
  /// threads.
  std::uint32_t copy(std::size_t index, std::byte* to);

 private:
  static constexpr std::size_t kNoLine = static_cast<std::size_t>(-1);
  /// A tensor's bytes.
  struct Source {
    /// Of a dense one on the CPU; null where `tensor` itself is read.
    const std::byte* on_host = nullptr;
    at::Tensor tensor;
    /// The same with its bytes one behind the other, from the first that is read to the last: one
    /// that is not dense is copied then, and no more of them at once than need be.
    at::Tensor dense;
    /// Bytes that have not been read.
    std::uint64_t left = 0;
    std::size_t line = kNoLine;

    bool on_device() const { return line != kNoLine; }
  };
  struct Place : DeviceLines::Place {
    /// What is there, or on its way.
    std::size_t chunk = 0;
  };

  void find_sources(const std::vector<at::Tensor>& tensors, std::size_t first);
  /// Of a source with a tensor; on a device, in the current stream, its line's.
  static std::uintptr_t address_of(Source& source);
  static void count_read(Source& source, std::uint64_t bytes);
  void make_places(std::size_t first);
  /// Begins to bring a chunk to its place.
  void bring(std::size_t index);
  /// Waits until it is there.
  Place& await(std::size_t index);
  const std::byte* data_of(const ChunkParts::Part& part, const std::byte* staged);
  void let_go_behind(std::size_t index);
  void fail(std::exception_ptr error) noexcept;

  const ChunkParts parts_;
  std::vector<Source> sources_;
  std::vector<Place> places_;
  DeviceLines lines_;
  /// Of `chunk` of all places, of copies of what is not dense, and of who uses the lines.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
};

}  // namespace libddp
