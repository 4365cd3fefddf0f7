#include "tests/fakegpu/mock_nccl.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include "tests/fakegpu/device_allocator.h"
#include "tests/fakegpu/nccl_communicator.h"
#include "tests/fakegpu/nccl_faults.h"
#include "tests/fakegpu/nccl_group.h"
#include "tests/fakegpu/nccl_reduce.h"
#include "tests/fakegpu/nccl_server.h"

namespace mock_nccl {
namespace {

/// A reduction that a rank made.
struct Reduction {
  ncclDataType_t dtype;
  std::vector<char> factor;
};

/// What handles of the table mean in this process.
struct Handles {
  std::mutex mutex;
  std::set<Communicator*> communicators;
  std::set<void*> registrations;
  std::map<std::pair<Communicator*, int>, Reduction> reductions;
  int next_reduction = ncclNumOps;
  std::uintptr_t next_registration = 1;
};

Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

ncclComm_t as_comm(Communicator* communicator) {
  return reinterpret_cast<ncclComm_t>(communicator);
}

/// Null for what was never a communicator.
Communicator* find(ncclComm_t comm) {
  const std::lock_guard lock(handles().mutex);
  auto* const communicator = reinterpret_cast<Communicator*>(comm);
  return handles().communicators.count(communicator) == 1 ? communicator : nullptr;
}

template <typename Change>
void count_live(const Change& change) {
  const std::lock_guard lock(Faults::get().mutex);
  change(Faults::get().live);
}

/// What a function of a communicator answers before it does anything.
ncclResult_t enter(const char* function, ncclComm_t comm) {
  const Communicator* const communicator = find(comm);
  if (communicator == nullptr) return ncclInvalidArgument;
  const ncclResult_t result = Faults::get().enter(function, communicator->rank());
  if (result != ncclSuccess) return result;
  return communicator->is_usable() ? ncclSuccess : ncclInvalidUsage;
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  if (const ncclResult_t result = Faults::get().enter("get_unique_id", -1)) return result;
  const std::string name = new_socket_name();
  *id = {};
  std::copy(name.begin(), name.end(), id->internal);
  Server::start(name);
  return ncclSuccess;
}

ncclResult_t connect(Communicator& communicator, const std::string& name) {
  if (Faults::get().hangs_init(communicator.rank())) {
    communicator.hang_until_abort();
    return ncclInvalidUsage;
  }
  try {
    return communicator.connect(name) ? ncclSuccess : ncclInvalidUsage;
  } catch (const std::system_error&) {
    communicator.async_error = ncclSystemError;
    return ncclSystemError;
  }
}

ncclResult_t comm_init_rank_scalable(ncclComm_t* comm, int num_ranks, int rank, int num_ids,
                                     ncclUniqueId* ids, ncclConfig_t* config) {
  if (const ncclResult_t result = Faults::get().enter("comm_init_rank_scalable", rank))
    return result;
  if (comm == nullptr || num_ids < 1 || rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  auto* const communicator = new Communicator(rank, num_ranks);
  {
    const std::lock_guard lock(handles().mutex);
    handles().communicators.insert(communicator);
  }
  count_live([](Live& live) { ++live.communicators; });
  *comm = as_comm(communicator);
  const std::string name = ids[0].internal;
  if (config != nullptr && config->blocking == 0) {
    std::thread([communicator, name] { connect(*communicator, name); }).detach();
    return ncclInProgress;
  }
  return connect(*communicator, name);
}

ncclResult_t comm_destroy(ncclComm_t comm) {
  if (const ncclResult_t result = enter("comm_destroy", comm)) return result;
  find(comm)->destroy();
  count_live([](Live& live) { --live.communicators; });
  return ncclSuccess;
}

ncclResult_t comm_abort(ncclComm_t comm) {
  if (const ncclResult_t result = enter("comm_abort", comm)) return result;
  find(comm)->abort();
  count_live([](Live& live) { --live.communicators; });
  return ncclSuccess;
}

ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* error) {
  if (const ncclResult_t result = enter("comm_get_async_error", comm)) return result;
  const Communicator& communicator = *find(comm);
  *error = communicator.async_error;
  if (*error == ncclSuccess && !communicator.is_connected()) *error = ncclInProgress;
  return ncclSuccess;
}

const char* get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* get_last_error(ncclComm_t) { return "mock NCCL"; }

ncclResult_t group_start() {
  Group::current().start();
  return Faults::get().enter("group_start", -1);
}

ncclResult_t group_end() {
  const ncclResult_t injected = Faults::get().enter("group_end", -1);
  if (injected != ncclSuccess) Group::current().refuse(injected);
  return Group::current().end();
}

/// What all operations share: `send_count` and `recv_count` elements at the two places.
ncclResult_t operate(const char* function, const void* send, std::size_t send_count, void* recv,
                     std::size_t recv_count, const WireCall& wire, ncclComm_t comm,
                     cudaStream_t stream) {
  Group& group = Group::current();
  if (const ncclResult_t result = enter(function, comm)) return group.refuse(result);
  const auto dtype = static_cast<ncclDataType_t>(wire.dtype);
  const std::size_t size = size_of(dtype);
  Communicator& communicator = *find(comm);
  const bool has_peer = wire.peer >= 0;
  const bool is_float8 = dtype == ncclFloat8e4m3 || dtype == ncclFloat8e5m2;
  if (is_float8 && api().version < NCCL_VERSION(2, 24, 0)) return group.refuse(ncclInvalidArgument);
  if (size == 0 || (send == nullptr && send_count > 0) || (recv == nullptr && recv_count > 0) ||
      (has_peer && wire.peer >= communicator.num_ranks()))
    return group.refuse(ncclInvalidArgument);
  OpCall call{wire, send, recv, {}};
  call.wire.send_bytes = send_count * size;
  call.wire.recv_bytes = recv_count * size;
  if (wire.reduction >= ncclNumOps) {
    const std::lock_guard lock(handles().mutex);
    const auto found = handles().reductions.find({&communicator, wire.reduction});
    if (found == handles().reductions.end() || found->second.dtype != dtype)
      return group.refuse(ncclInvalidArgument);
    call.factor = found->second.factor;
    call.wire.reduction = ncclSum;
  }
  return group.add(function, communicator, fakegpu::DeviceStream::of_handle(stream),
                   std::move(call));
}

ncclResult_t all_reduce(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate("all_reduce", send, count, recv, count,
                 {Kind::kAllReduce, dtype, op, -1, count, 0, 0}, comm, stream);
}

bool is_rank(ncclComm_t comm, int rank) {
  const Communicator* const communicator = find(comm);
  return communicator != nullptr && communicator->rank() == rank;
}

ncclResult_t reduce_to_root(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate("reduce", send, count, recv, is_rank(comm, root) ? count : 0,
                 {Kind::kReduce, dtype, op, root, count, 0, 0}, comm, stream);
}

ncclResult_t broadcast(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                       int root, ncclComm_t comm, cudaStream_t stream) {
  return operate("broadcast", send, is_rank(comm, root) ? count : 0, recv, count,
                 {Kind::kBroadcast, dtype, ncclSum, root, count, 0, 0}, comm, stream);
}

std::size_t num_ranks(ncclComm_t comm) {
  const Communicator* const communicator = find(comm);
  return communicator == nullptr ? 0 : static_cast<std::size_t>(communicator->num_ranks());
}

ncclResult_t all_gather(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                        ncclComm_t comm, cudaStream_t stream) {
  return operate("all_gather", send, count, recv, count * num_ranks(comm),
                 {Kind::kAllGather, dtype, ncclSum, -1, count, 0, 0}, comm, stream);
}

ncclResult_t reduce_scatter(const void* send, void* recv, std::size_t count, ncclDataType_t dtype,
                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate("reduce_scatter", send, count * num_ranks(comm), recv, count,
                 {Kind::kReduceScatter, dtype, op, -1, count, 0, 0}, comm, stream);
}

ncclResult_t send(const void* data, std::size_t count, ncclDataType_t dtype, int peer,
                  ncclComm_t comm, cudaStream_t stream) {
  return operate("send", data, count, nullptr, 0, {Kind::kSend, dtype, ncclSum, peer, count, 0, 0},
                 comm, stream);
}

ncclResult_t recv(void* data, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  return operate("recv", nullptr, 0, data, count, {Kind::kRecv, dtype, ncclSum, peer, count, 0, 0},
                 comm, stream);
}

ncclResult_t red_op_create_pre_mul_sum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                       ncclScalarResidence_t residence, ncclComm_t comm) {
  if (const ncclResult_t result = enter("red_op_create_pre_mul_sum", comm)) return result;
  // A scalar on the device would have to be read when the operation runs.
  if (residence != ncclScalarHostImmediate || size_of(dtype) == 0) return ncclInvalidArgument;
  const auto* const bytes = static_cast<const char*>(scalar);
  Communicator* const communicator = find(comm);
  const std::lock_guard lock(handles().mutex);
  const int number = handles().next_reduction++;
  handles().reductions[{communicator, number}] = {dtype, {bytes, bytes + size_of(dtype)}};
  *op = static_cast<ncclRedOp_t>(number);
  count_live([](Live& live) { ++live.reductions; });
  return ncclSuccess;
}

ncclResult_t red_op_destroy(ncclRedOp_t op, ncclComm_t comm) {
  if (const ncclResult_t result = enter("red_op_destroy", comm)) return result;
  Communicator* const communicator = find(comm);
  const std::lock_guard lock(handles().mutex);
  if (handles().reductions.erase({communicator, op}) == 0) return ncclInvalidArgument;
  count_live([](Live& live) { --live.reductions; });
  return ncclSuccess;
}

ncclResult_t mem_alloc(void** data, std::size_t bytes) {
  if (const ncclResult_t result = Faults::get().enter("mem_alloc", -1)) return result;
  *data = fakegpu::DeviceAllocator::get().allocate_plain(bytes);
  count_live([](Live& live) { ++live.memory; });
  return ncclSuccess;
}

ncclResult_t mem_free(void* data) {
  if (const ncclResult_t result = Faults::get().enter("mem_free", -1)) return result;
  if (!fakegpu::DeviceAllocator::get().free_plain(data)) return ncclInvalidArgument;
  count_live([](Live& live) { --live.memory; });
  return ncclSuccess;
}

void* new_registration() {
  const std::lock_guard lock(handles().mutex);
  void* const handle = reinterpret_cast<void*>(handles().next_registration++);
  handles().registrations.insert(handle);
  return handle;
}

bool end_registration(void* handle) {
  const std::lock_guard lock(handles().mutex);
  return handles().registrations.erase(handle) == 1;
}

ncclResult_t comm_register(const ncclComm_t comm, void* data, std::size_t, void** handle) {
  if (const ncclResult_t result = enter("comm_register", comm)) return result;
  if (data == nullptr) return ncclInvalidArgument;
  *handle = new_registration();
  count_live([](Live& live) { ++live.registrations; });
  return ncclSuccess;
}

ncclResult_t comm_deregister(const ncclComm_t comm, void* handle) {
  if (const ncclResult_t result = enter("comm_deregister", comm)) return result;
  if (!end_registration(handle)) return ncclInvalidArgument;
  count_live([](Live& live) { --live.registrations; });
  return ncclSuccess;
}

libddp::NcclApi make_api(int version) {
  libddp::NcclApi api;
  api.version = version;
  api.path = "mock NCCL";
  api.get_unique_id = &get_unique_id;
  api.comm_init_rank_scalable = &comm_init_rank_scalable;
  api.comm_destroy = &comm_destroy;
  api.comm_abort = &comm_abort;
  api.comm_get_async_error = &comm_get_async_error;
  api.get_error_string = &get_error_string;
  api.get_last_error = &get_last_error;
  api.group_start = &group_start;
  api.group_end = &group_end;
  api.all_reduce = &all_reduce;
  api.reduce = &reduce_to_root;
  api.broadcast = &broadcast;
  api.all_gather = &all_gather;
  api.reduce_scatter = &reduce_scatter;
  api.send = &send;
  api.recv = &recv;
  api.red_op_create_pre_mul_sum = &red_op_create_pre_mul_sum;
  api.red_op_destroy = &red_op_destroy;
  api.mem_alloc = &mem_alloc;
  api.mem_free = &mem_free;
  api.comm_register = &comm_register;
  api.comm_deregister = &comm_deregister;
  return api;
}

/// Never freed: works of an earlier install may still use theirs.
libddp::NcclApi*& table() {
  static auto* api = new libddp::NcclApi(make_api(NCCL_VERSION_CODE));
  return api;
}

}  // namespace

const libddp::NcclApi& api() { return *table(); }
void install() { libddp::NcclApi::install(table()); }
void uninstall() { libddp::NcclApi::install(nullptr); }
void set_version(int version) { table() = new libddp::NcclApi(make_api(version)); }

}  // namespace mock_nccl
