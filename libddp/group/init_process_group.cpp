#include "libddp/group/init_process_group.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <sstream>
#include <string>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/group/backend_registry.h"
#include "libddp/rendezvous/rendezvous.h"

namespace libddp {
namespace {

/// Names that mean our host backend, alone or for the device cpu.
bool is_host_name(const std::string& name) {
  return name == "auto" || name == "libddp" || name == "gloo" || name == "shm" || name == "host";
}

[[noreturn]] void refuse_backend(const std::string& backend, const std::string& why) {
  throw ArgumentError(
      fmt::format("libddp: backend '{}': {}. Hint: use 'auto', 'libddp' or 'gloo'.", backend, why));
}

bool has_cuda_device() {
  return has_backend(c10::DeviceType::CUDA) &&
         c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA) &&
         c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount() > 0;
}

/// One "name" or "device:name" of a list. Returns whether it alone would do: a group that moves
/// CUDA tensors moves those of the CPU too.
bool check_backend_part(const std::string& backend, const std::string& part) {
  const std::size_t colon = part.find(':');
  const std::string device = colon == std::string::npos ? "" : part.substr(0, colon);
  const std::string name = colon == std::string::npos ? part : part.substr(colon + 1);
  if (is_host_name(name) && (device.empty() || device == "cpu")) return true;
  const bool is_nccl = name == "nccl" && (device.empty() || device == "cuda");
  if (is_nccl && (has_cuda_device() || !device.empty())) return has_cuda_device();
  if (is_nccl) {
    refuse_backend(backend, has_backend(c10::DeviceType::CUDA)
                                ? "nccl moves CUDA tensors, and there is no CUDA device here"
                                : "nccl moves CUDA tensors, and this build has no CUDA");
  }
  refuse_backend(backend, fmt::format("'{}' is not known", part));
}

void check_backend(const std::string& backend) {
  bool does = false;
  std::istringstream list(backend);
  for (std::string part; std::getline(list, part, ',');) {
    does = check_backend_part(backend, part) || does;
  }
  if (!does) refuse_backend(backend, "it names nothing for CPU tensors");
}

}  // namespace

Group init_process_group(const InitOptions& options) {
  check_backend(options.backend);
  Rendezvous found = rendezvous({.init_method = options.init_method,
                                 .rank = options.rank,
                                 .world_size = options.world_size,
                                 .timeout = options.timeout,
                                 .store = options.store});
  Group group = ProcessGroup::create(std::move(found.store), {.rank = found.rank,
                                                              .world_size = found.world_size,
                                                              .name = options.group_name,
                                                              .timeout = options.timeout,
                                                              .global_ranks = {},
                                                              .inter = options.inter,
                                                              .links = options.links,
                                                              .require_key = options.require_key});
  remember(found.visit);
  return group;
}

}  // namespace libddp
