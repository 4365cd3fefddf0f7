#pragma once

// Ranks of a mock communicator, each on a device of its own, as threads or as processes.
//
//   run_threads(2, [](Rank& rank) { rank.nccl.all_reduce(..., rank.comm, rank.stream); });

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <functional>
#include <string>

#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/with_device.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/run_ranks.h"

namespace fakegpu::test {

struct Rank {
  const libddp::NcclApi& nccl;
  int index;
  ncclComm_t comm;
  /// The default stream of the rank's device.
  cudaStream_t stream;

  c10::Device device() const { return device_at(index); }
  void synchronize() const { default_stream(index).synchronize(); }
};

inline cudaStream_t handle_of(const c10::Stream& stream) {
  return static_cast<cudaStream_t>(stream.native_handle());
}

inline void require(ncclResult_t result, const std::string& what) {
  libddp::test::expect(result == ncclSuccess, what + " gave " + std::to_string(result));
}

inline ncclUniqueId new_id() {
  ncclUniqueId id;
  require(mock_nccl::api().get_unique_id(&id), "get_unique_id");
  return id;
}

/// One rank: joins, works, and destroys its communicator unless it is aborted.
inline void run_rank(int index, int num_ranks, ncclUniqueId id,
                     const std::function<void(Rank&)>& work) {
  const libddp::NcclApi& nccl = mock_nccl::api();
  const c10::DeviceGuard on_device(device_at(index));
  ncclComm_t comm = nullptr;
  require(nccl.comm_init_rank_scalable(&comm, num_ranks, index, 1, &id, nullptr), "init");
  Rank rank{nccl, index, comm, handle_of(default_stream(index))};
  work(rank);
  const ncclResult_t result = nccl.comm_destroy(comm);
  libddp::test::expect(result == ncclSuccess || result == ncclInvalidUsage, "destroy");
}

inline void run_threads(int num_ranks, const std::function<void(Rank&)>& work) {
  const ncclUniqueId id = new_id();
  libddp::test::run_ranks(num_ranks, [&](int index) { run_rank(index, num_ranks, id, work); });
}

inline void run_processes(int num_ranks, const std::function<void(Rank&)>& work) {
  const ncclUniqueId id = new_id();
  const auto results = libddp::test::fork_ranks(num_ranks, [&](int index) -> std::string {
    run_rank(index, num_ranks, id, work);
    return "";
  });
  for (const auto& result : results) libddp::test::expect(result.ok(), result.text);
}

/// The mock is as new, and has been given everything back when a test is over.
struct WithNccl : WithDevice {
  WithNccl() { mock_nccl::reset(); }
  ~WithNccl() { mock_nccl::reset(); }
};

}  // namespace fakegpu::test
