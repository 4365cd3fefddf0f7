#include "libddp/cuda/nccl_communicator.h"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <utility>

#include "libddp/base/blocking_calls.h"
#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/cuda/nccl_rendezvous.h"

namespace libddp {
namespace {

constexpr std::chrono::seconds kTimeToDestroy{10};
constexpr std::chrono::milliseconds kTimeToIssue{500};

/// What a call of NCCL that waits for others has come to.
struct Joined {
  ncclResult_t result = ncclSuccess;
  /// Asked for in the thread of the call, where NCCL keeps it.
  std::string error;
};

/// Between the thread that joins and the one that waits for it: a communicator that nobody waits
/// for any more when it comes is ended at once.
class Handover {
 public:
  explicit Handover(const NcclApi& api) : api_(api) {}

  void come(ncclComm_t comm) {
    const std::lock_guard lock(mutex_);
    if (!is_given_up_) {
      comm_ = comm;
    } else if (comm != nullptr) {
      api_.comm_abort(comm);
    }
  }
  ncclComm_t take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(comm_, nullptr);
  }
  void give_up() {
    const std::lock_guard lock(mutex_);
    is_given_up_ = true;
    if (comm_ != nullptr) api_.comm_abort(std::exchange(comm_, nullptr));
  }

 private:
  const NcclApi& api_;
  std::mutex mutex_;
  bool is_given_up_ = false;
  ncclComm_t comm_ = nullptr;
};

Joined join(const NcclApi& api, std::vector<ncclUniqueId> ids, int rank, int world_size,
            c10::Device device, Handover& handover) {
  Joined joined;
  const c10::DeviceGuard guard(device);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comm = nullptr;
  joined.result = api.comm_init_rank_scalable(&comm, world_size, rank, static_cast<int>(ids.size()),
                                              ids.data(), &config);
  if (joined.result == ncclSuccess) {
    handover.come(comm);
  } else {
    joined.error = nccl_error_text(api, joined.result, nullptr);
  }
  return joined;
}

std::string hint_for(const NcclApi& api, const std::string& error) {
  if (error.find("uplicate GPU") == std::string::npos) {
    return "NCCL_DEBUG=INFO shows what NCCL did; all ranks need one version of NCCL, a device "
           "each, "
           "and a network between the hosts (NCCL_SOCKET_IFNAME)";
  }
  return "two ranks use one device: " + shared_device_hint(api);
}

}  // namespace

NcclCommunicator::NcclCommunicator(const NcclApi& api, std::vector<ncclUniqueId> ids, Place place,
                                   Deadline deadline, const std::function<void()>& look)
    : api_(api), place_(std::move(place)) {
  const auto handover = std::make_shared<Handover>(api);
  BlockingCalls calls("libddp-nccl");
  std::optional<Joined> joined;
  try {
    joined = calls.run<Joined>(
        [&api, ids = std::move(ids), rank = place_.rank, world_size = place_.world_size,
         device = place_.device, handover]() mutable {
          return join(api, std::move(ids), rank, world_size, device, *handover);
        },
        deadline, look);
  } catch (...) {
    handover->give_up();
    throw;
  }
  if (!joined) {
    handover->give_up();
    throw TimeoutError(fmt::format(
        "{}: NCCL has not brought the ranks together in time, although all of them have come. "
        "Hint: look at the network between the hosts (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME).",
        place_.where));
  }
  if (joined->result != ncclSuccess) {
    throw DeviceError(fmt::format("{} on {}: {}. Hint: {}.", place_.where, place_.device.str(),
                                  joined->error, hint_for(api, joined->error)));
  }
  comm_ = handover->take();
}

NcclCommunicator::~NcclCommunicator() { abort(); }

ncclComm_t NcclCommunicator::get() const {
  const std::lock_guard lock(mutex_);
  return comm_;
}

ncclResult_t NcclCommunicator::async_error() const {
  const std::lock_guard lock(mutex_);
  ncclResult_t error = ncclSuccess;
  if (comm_ == nullptr) return error;
  const ncclResult_t asked = api_.comm_get_async_error(comm_, &error);
  return asked == ncclSuccess ? error : asked;
}

void* NcclCommunicator::register_memory(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  void* handle = nullptr;
  if (comm_ == nullptr) return nullptr;
  check_nccl(api_, api_.comm_register(comm_, data, bytes, &handle), comm_, place_.where);
  return handle;
}

void NcclCommunicator::deregister(void* handle) {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr || handle == nullptr) return;
  check_nccl(api_, api_.comm_deregister(comm_, handle), comm_, place_.where);
}

ncclComm_t NcclCommunicator::take() noexcept {
  const std::lock_guard lock(mutex_);
  return std::exchange(comm_, nullptr);
}

void NcclCommunicator::abort() noexcept {
  // A call that takes long waits for a peer, and it is the abort that ends it.
  const std::unique_lock use(use_mutex_, kTimeToIssue);
  const ncclComm_t comm = take();
  if (comm == nullptr) return;
  try {
    const c10::DeviceGuard guard(place_.device);
    check_nccl(api_, api_.comm_abort(comm), nullptr, place_.where);
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "nccl_abort_failed", {{"error", error.what()}});
  }
}

void NcclCommunicator::destroy() noexcept {
  const ncclComm_t comm = take();
  if (comm == nullptr) return;
  try {
    BlockingCalls calls("libddp-nccl");
    const auto result = calls.run<ncclResult_t>(
        [&api = api_, comm, device = place_.device] {
          const c10::DeviceGuard guard(device);
          return api.comm_destroy(comm);
        },
        Deadline::after(kTimeToDestroy));
    if (result == ncclSuccess) return;
    log(LogLevel::Warn, "nccl_destroy_failed",
        {{"where", place_.where},
         {"error", result ? nccl_error_text(api_, *result, nullptr) : "it does not end"}});
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "nccl_destroy_failed", {{"error", error.what()}});
  }
}

}  // namespace libddp
