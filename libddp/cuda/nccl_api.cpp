#include "libddp/cuda/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string_view>
#include <vector>

#include "libddp/base/error.h"

namespace libddp {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr const char* kGetHint =
    "install the one that this torch was built for (pip install nvidia-nccl-cu13 or -cu12), or put "
    "its folder into LD_LIBRARY_PATH before the program starts";

/// Files of all NCCL libraries that this process has mapped.
std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  const auto add = [](dl_phdr_info* info, std::size_t, void* data) {
    const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    const std::string_view file = path.substr(path.rfind('/') + 1);
    if (file.rfind("libnccl.so", 0) == 0)
      static_cast<std::vector<std::string>*>(data)->emplace_back(path);
    return 0;
  };
  ::dl_iterate_phdr(add, &paths);
  return paths;
}

/// Finds a function by its name; null where there is none.
using Lookup = std::function<void*(const char* name)>;

template <typename Function>
void find(const Lookup& library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(library(name));
}

template <typename Function>
void require(const Lookup& library, const NcclApi& api, const char* name, Function& function) {
  find(library, name, function);
  if (function != nullptr) return;
  throw DeviceError(fmt::format("libddp: {} (NCCL {}) has no {}. Hint: {}.", api.path,
                                NcclApi::version_text(api.version), name, kGetHint));
}

std::string path_of(void* function) {
  Dl_info info{};
  return ::dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : kLibrary;
}

[[noreturn]] void refuse_several(const std::string& one, const std::string& other) {
  throw DeviceError(fmt::format(
      "libddp: this process has loaded two NCCL libraries, {} and {}, and torch's and libddp's "
      "calls could end in different ones. Hint: look for a package that brings an NCCL of its own; "
      "to have another one for both, set LD_PRELOAD before the program starts.",
      one, other));
}

/// Where the loader finds a function of NCCL for everybody: of LD_PRELOAD, of the program's own
/// libraries, of what was loaded with RTLD_GLOBAL. Null: nowhere.
void* everybodys(const char* name) { return ::dlsym(RTLD_DEFAULT, name); }

/// Where it finds one for torch, if it is nowhere for everybody: among the libraries that torch
/// was linked with, which may be torch's own.
void* torchs(const char* name) {
  void* const torch = ::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  return torch == nullptr ? nullptr : ::dlsym(torch, name);
}

/// The library that torch calls; else the one that somebody has loaded; else the system's. Several
/// in a process are normal: torch loads the one beside it by its path, and where another one has
/// been preloaded, calls that.
Lookup find_library() {
  constexpr const char* kProbe = "ncclGetVersion";
  void* const of_all = everybodys(kProbe);
  void* const of_torch = torchs(kProbe);
  if (of_all != nullptr && of_torch != nullptr && path_of(of_all) != path_of(of_torch)) {
    refuse_several(path_of(of_torch), path_of(of_all));
  }
  if (of_all != nullptr) return &everybodys;
  if (of_torch != nullptr) return &torchs;
  const std::vector<std::string> loaded = loaded_libraries();
  if (loaded.size() > 1) refuse_several(loaded[0], loaded[1]);
  if (void* const found = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) {
    return [found](const char* name) { return ::dlsym(found, name); };
  }
  const char* const why = ::dlerror();
  throw DeviceError(fmt::format("libddp: NCCL was not found ({}). Hint: {}.",
                                why == nullptr ? kLibrary : why, kGetHint));
}

void check_version(const NcclApi& api) {
  if (api.version >= NcclApi::kOldestVersion) return;
  throw DeviceError(fmt::format("libddp: {} is NCCL {}, and libddp needs {} or later. Hint: {}.",
                                api.path, NcclApi::version_text(api.version),
                                NcclApi::version_text(NcclApi::kOldestVersion), kGetHint));
}

NcclApi load() {
  const Lookup library = find_library();
  NcclApi api;
  decltype(&::ncclGetVersion) get_version = nullptr;
  find(library, "ncclGetVersion", get_version);
  if (get_version == nullptr || get_version(&api.version) != ncclSuccess) {
    throw DeviceError(
        fmt::format("libddp: {} does not tell its version. Hint: {}.", kLibrary, kGetHint));
  }
  api.path = path_of(reinterpret_cast<void*>(get_version));
  check_version(api);
  require(library, api, "ncclGetUniqueId", api.get_unique_id);
  require(library, api, "ncclCommInitRankScalable", api.comm_init_rank_scalable);
  require(library, api, "ncclCommDestroy", api.comm_destroy);
  require(library, api, "ncclCommAbort", api.comm_abort);
  require(library, api, "ncclCommGetAsyncError", api.comm_get_async_error);
  require(library, api, "ncclGetErrorString", api.get_error_string);
  require(library, api, "ncclGetLastError", api.get_last_error);
  require(library, api, "ncclGroupStart", api.group_start);
  require(library, api, "ncclGroupEnd", api.group_end);
  require(library, api, "ncclAllReduce", api.all_reduce);
  require(library, api, "ncclReduce", api.reduce);
  require(library, api, "ncclBroadcast", api.broadcast);
  require(library, api, "ncclAllGather", api.all_gather);
  require(library, api, "ncclReduceScatter", api.reduce_scatter);
  require(library, api, "ncclSend", api.send);
  require(library, api, "ncclRecv", api.recv);
  require(library, api, "ncclRedOpCreatePreMulSum", api.red_op_create_pre_mul_sum);
  require(library, api, "ncclRedOpDestroy", api.red_op_destroy);
  require(library, api, "ncclMemAlloc", api.mem_alloc);
  require(library, api, "ncclMemFree", api.mem_free);
  require(library, api, "ncclCommRegister", api.comm_register);
  require(library, api, "ncclCommDeregister", api.comm_deregister);
  return api;
}

std::atomic<const NcclApi*> installed{nullptr};

}  // namespace

const NcclApi& NcclApi::get() {
  if (const NcclApi* const api = installed.load(std::memory_order_acquire)) return *api;
  static std::mutex mutex;
  static std::atomic<const NcclApi*> loaded{nullptr};
  if (const NcclApi* const api = loaded.load(std::memory_order_acquire)) return *api;
  const std::lock_guard lock(mutex);
  // Never freed: threads of NCCL and works that are in flight may outlive static objects.
  if (loaded.load() == nullptr) loaded.store(new NcclApi(load()), std::memory_order_release);
  return *loaded.load();
}

void NcclApi::install(const NcclApi* api) { installed.store(api, std::memory_order_release); }

std::string NcclApi::version_text(int version) {
  // Until 2.8 a version was major * 1000 + minor * 100 + patch.
  const int unit = version >= 10000 ? 10000 : 1000;
  return fmt::format("{}.{}.{}", version / unit, version % unit / 100, version % 100);
}

std::string nccl_error_text(const NcclApi& api, ncclResult_t result, ncclComm_t comm) {
  const char* const text = api.get_error_string(result);
  const char* const last = api.get_last_error(comm);
  std::string message = fmt::format("NCCL {}: {}", NcclApi::version_text(api.version),
                                    text == nullptr ? "unknown error" : text);
  if (last != nullptr && *last != '\0') message += fmt::format(" ({})", last);
  return message;
}

void check_nccl(const NcclApi& api, ncclResult_t result, ncclComm_t comm,
                const std::string& where) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw DeviceError(
      fmt::format("{}: {}. Hint: NCCL_DEBUG=INFO shows what NCCL did; an error of CUDA is that of "
                  "a kernel that ran before (CUDA_LAUNCH_BLOCKING=1 shows which).",
                  where, nccl_error_text(api, result, comm)));
}

}  // namespace libddp
