#pragma once

// What ranks must know about their devices and c10 does not tell.
// Thread rule: any thread.
//
//   if (compute_capability(device).value_or(90) < 90) ...   // older than Hopper
//   const std::string identity = device_identity(device);   // equal: the same device

#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace libddp {

/// 90 is sm_90; nullopt where the device has none, or does not tell.
std::optional<int> compute_capability(c10::Device device);

/// Which device of all machines this is, whatever index a process has for it: "GPU-<uuid>", of a
/// part of a GPU (MIG) its own. Devices that are not CUDA's: machine and index. "" = unknown.
std::string device_identity(c10::Device device);

}  // namespace libddp
