#include "libddp/cuda/device_facts.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "libddp/base/process.h"
#include "libddp/cuda/loaded_cuda.h"

namespace libddp {
namespace {

/// cuDeviceGetUuid_v2 as cuda.h has it, which comes with toolkits only. A CUdevice is the index
/// that the runtime has, too.
using GetUuid = int(cudaUUID_t*, int);

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

}  // namespace

std::optional<int> compute_capability(c10::Device device) {
  if (device.type() != c10::DeviceType::CUDA) return std::nullopt;
  static auto* const ask =
      runtime_function<decltype(::cudaDeviceGetAttribute)>("cudaDeviceGetAttribute");
  int major = 0;
  int minor = 0;
  if (ask == nullptr || ask(&major, cudaDevAttrComputeCapabilityMajor, device.index()) ||
      ask(&minor, cudaDevAttrComputeCapabilityMinor, device.index())) {
    return std::nullopt;
  }
  return major * 10 + minor;
}

std::string device_identity(c10::Device device) {
  if (device.type() != c10::DeviceType::CUDA) {
    return fmt::format("{} of machine {}", device.str(), machine_id());
  }
  static auto* const ask = driver_function<GetUuid>("cuDeviceGetUuid_v2");
  cudaUUID_t uuid{};
  if (ask == nullptr || ask(&uuid, device.index()) != 0) return "";
  return uuid_text(uuid);
}

}  // namespace libddp
