#include "libddp/cuda/nccl_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/env.h"
#include "libddp/base/log.h"

namespace libddp {
namespace {

/// Gives memory back: behind everything that the device has been told to do.
void free_memory(const NcclApi& api, NcclCommunicator& communicator, void* data,
                 void* registration) noexcept {
  try {
    const c10::DeviceGuard guard(communicator.device());
    const c10::impl::VirtualGuardImpl device(communicator.device().type());
    device.synchronizeDevice(communicator.device().index());
    communicator.deregister(registration);
    check_nccl(api, api.mem_free(data), nullptr, "libddp: freeing memory of NCCL");
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "nccl_memory_lost", {{"error", error.what()}});
  }
}

}  // namespace

bool wants_nccl_memory() { return env_flag("LIBDDP_NCCL_REGISTER", false); }

at::Tensor nccl_memory(const NcclApi& api, std::shared_ptr<NcclCommunicator> communicator,
                       at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto bytes = std::max<std::size_t>(
      1, static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype));
  const c10::Device device = communicator->device();
  const c10::DeviceGuard guard(device);
  void* data = nullptr;
  check_nccl(
      api, api.mem_alloc(&data, bytes), nullptr,
      fmt::format("libddp: allocating {} bytes of NCCL's memory on {}", bytes, device.str()));
  void* const registration = communicator->register_memory(data, bytes);
  return at::from_blob(
      data, sizes,
      [&api, communicator = std::move(communicator), registration](void* freed) {
        free_memory(api, *communicator, freed, registration);
      },
      at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace libddp
