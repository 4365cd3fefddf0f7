#pragma once

// One communicator of NCCL on one device.
//
// It is a blocking one, because a non-blocking one starts a thread for every operation. NCCL's
// calls that wait for other ranks, which have no deadline of their own, are made in a thread
// beside; where the deadline passes, that thread is left behind with what it holds.
// Thread rule: `abort` and `async_error` from any thread, the rest by one thread at a time.
//
//   NcclCommunicator comm(api, device, ids, 0, 2, where, deadline, look);
//   const auto use = comm.lock_for_use();
//   api.all_reduce(in, out, count, ncclFloat32, ncclSum, comm.get(), stream);
//   comm.abort();      // ends what is in flight

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/cuda/nccl_api.h"
#include "libddp/cuda/nccl_header.h"

namespace libddp {

class NcclCommunicator {
 public:
  struct Place {
    int rank = 0;
    int world_size = 1;
    c10::Device device;
    /// Begins errors: "libddp[group world, rank 0/2] join".
    std::string where;
  };

  /// A collective of its ranks: blocks until NCCL has brought them together. `look` is called ten
  /// times a second; what it throws ends the wait. Throws DeviceError, TimeoutError.
  NcclCommunicator(const NcclApi& api, std::vector<ncclUniqueId> ids, Place place,
                   Deadline deadline, const std::function<void()>& look);
  /// Aborts, unless it was destroyed in order.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  /// Held around each use of `get`: an abort waits for it, for a while.
  std::unique_lock<std::timed_mutex> lock_for_use() { return std::unique_lock(use_mutex_); }
  /// Null once it is aborted or destroyed.
  ncclComm_t get() const;
  const c10::Device& device() const { return place_.device; }
  /// What has gone wrong since; ncclSuccess where nothing has.
  ncclResult_t async_error() const;
  /// Makes memory of NCCL's known to the communicator: a handle for `deregister`, or null where it
  /// is of no use (the communicator has ended, or NCCL has nothing to register it with).
  void* register_memory(void* data, std::size_t bytes);
  void deregister(void* handle);
  /// Ends what is in flight; the data is undefined then.
  void abort() noexcept;
  /// In order: all operations are done on every rank. Waits for a while.
  void destroy() noexcept;

 private:
  ncclComm_t take() noexcept;

  const NcclApi& api_;
  const Place place_;
  std::timed_mutex use_mutex_;
  mutable std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace libddp
