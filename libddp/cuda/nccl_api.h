#pragma once

// The functions of NCCL that libddp calls, in a table that is filled at run time: from the library
// that torch has loaded, so that both use one NCCL, or by a test with functions of its own.
//
// Nothing is linked: the same binary runs where there is no NCCL. The oldest version supported has
// all of them.
// Thread rule: immutable once loaded; any thread. `install` before the first use.
//
//   const NcclApi& nccl = NcclApi::get();   // throws DeviceError where there is none
//   check(nccl, nccl.all_reduce(send, recv, count, ncclFloat, ncclAvg, comm, stream), "...");

#include <string>

#include "libddp/cuda/nccl_header.h"

namespace libddp {

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 27, 0)
#error "libddp needs the header of NCCL 2.27 or later"
#endif

struct NcclApi {
  /// Older libraries are refused: ncclCommInitRankScalable and everything before it must be there.
  static constexpr int kOldestVersion = NCCL_VERSION(2, 23, 4);
  /// Reductions of 8-bit floats.
  static constexpr int kFloat8Version = NCCL_VERSION(2, 24, 0);
  /// Two ranks on one device, with NCCL_MULTI_RANK_GPU_ENABLE=1.
  static constexpr int kSharedDeviceVersion = NCCL_VERSION(2, 30, 0);

  /// As ncclGetVersion gives it: 22809 is 2.28.9.
  int version = 0;
  /// File of the library.
  std::string path;

  decltype(&::ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&::ncclCommInitRankScalable) comm_init_rank_scalable = nullptr;
  decltype(&::ncclCommDestroy) comm_destroy = nullptr;
  decltype(&::ncclCommAbort) comm_abort = nullptr;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&::ncclGetErrorString) get_error_string = nullptr;
  decltype(&::ncclGetLastError) get_last_error = nullptr;
  decltype(&::ncclGroupStart) group_start = nullptr;
  decltype(&::ncclGroupEnd) group_end = nullptr;
  decltype(&::ncclAllReduce) all_reduce = nullptr;
  decltype(&::ncclReduce) reduce = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclAllGather) all_gather = nullptr;
  decltype(&::ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;
  decltype(&::ncclRedOpCreatePreMulSum) red_op_create_pre_mul_sum = nullptr;
  decltype(&::ncclRedOpDestroy) red_op_destroy = nullptr;
  decltype(&::ncclMemAlloc) mem_alloc = nullptr;
  decltype(&::ncclMemFree) mem_free = nullptr;
  decltype(&::ncclCommRegister) comm_register = nullptr;
  decltype(&::ncclCommDeregister) comm_deregister = nullptr;

  /// The table of this process; loads it at the first call. Throws DeviceError where no NCCL can be
  /// found, several are loaded, or it is too old; the next call tries again.
  static const NcclApi& get();
  /// From now on get() gives `api`, which must outlive its use; null = the library again. For
  /// tests.
  static void install(const NcclApi* api);
  /// "2.28.9".
  static std::string version_text(int version);
};

/// Throws DeviceError with NCCL's own text where `result` is neither success nor in progress;
/// `where` begins it: "libddp[group world, rank 0/2] all_reduce #7 float32 [8]".
void check_nccl(const NcclApi& api, ncclResult_t result, ncclComm_t comm, const std::string& where);
/// "unhandled cuda error: ...", with NCCL's last line about `comm` (may be null).
std::string nccl_error_text(const NcclApi& api, ncclResult_t result, ncclComm_t comm);

}  // namespace libddp
