#pragma once

// Faults in the pages of large blocks before they are needed. The first touch of fresh shared
// memory costs more than the copy that touches it (about 17 times slower than warm memory), so one
// background thread per process does it, piece by piece.
//
// The thread starts with the first job and lives until the process ends; it holds nothing while it
// sleeps. A child of fork() has no such thread until it makes a job of its own.
// Thread rule: any thread.
//
//   std::shared_ptr<PrefaultJob> job = prefault(data, size_bytes);
//   job->cancel();   // before the memory is unmapped or given back

#include <atomic>
#include <cstddef>
#include <memory>

#include "libddp/base/process.h"

namespace libddp {

/// The pages of one block that wait for the thread. Contents of the memory never change.
class PrefaultJob {
 public:
  PrefaultJob(std::byte* data, std::size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  /// Afterwards the thread touches none of the block's pages. Waits for the piece in progress
  /// (a millisecond or so), not for the block.
  void cancel() noexcept;

  /// For the thread: faults in the next piece; false when nothing is left or it was cancelled.
  bool run_piece();

  /// True when all pages were faulted in, or the kernel refused (memory is short).
  bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  std::byte* data_;
  std::size_t size_bytes_;
  std::size_t finished_bytes_ = 0;
  // Either cancel() sees running_, or run_piece() sees cancelled_: both are sequentially
  // consistent.
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> running_{false};
  std::atomic<bool> done_{false};
  ProcessStamp made_;
};

/// Queues the whole pages that [data, data + size_bytes) touches.
std::shared_ptr<PrefaultJob> prefault(std::byte* data, std::size_t size_bytes);

}  // namespace libddp
