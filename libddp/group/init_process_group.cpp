#include "libddp/group/init_process_group.h"

#include <fmt/format.h>

#include <sstream>
#include <string>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/rendezvous/rendezvous.h"

namespace libddp {
namespace {

/// Names that mean our host backend, alone or for the device cpu.
bool is_host_name(const std::string& name) {
  return name == "auto" || name == "libddp" || name == "gloo" || name == "shm" || name == "host";
}

[[noreturn]] void refuse_backend(const std::string& backend, const std::string& why) {
  throw ArgumentError(
      fmt::format("libddp: backend '{}': {}. Hint: use 'auto', 'libddp' or 'gloo' for CPU tensors.",
                  backend, why));
}

/// One "name" or "device:name" of a list. Returns whether it serves CPU tensors.
bool check_backend_part(const std::string& backend, const std::string& part) {
  const std::size_t colon = part.find(':');
  const std::string device = colon == std::string::npos ? "" : part.substr(0, colon);
  const std::string name = colon == std::string::npos ? part : part.substr(colon + 1);
  if (is_host_name(name) && (device.empty() || device == "cpu")) return true;
  if (name == "nccl" && device == "cuda") return false;  // without effect until CUDA is used
  if (name == "nccl")
    refuse_backend(backend, "nccl moves CUDA tensors, and this build has no CUDA");
  refuse_backend(backend, fmt::format("'{}' is not known", part));
}

void check_backend(const std::string& backend) {
  bool serves_cpu = false;
  std::istringstream list(backend);
  for (std::string part; std::getline(list, part, ',');) {
    serves_cpu = check_backend_part(backend, part) || serves_cpu;
  }
  if (!serves_cpu) refuse_backend(backend, "it names nothing for CPU tensors");
}

}  // namespace

Group init_process_group(const InitOptions& options) {
  check_backend(options.backend);
  Rendezvous found = rendezvous({.init_method = options.init_method,
                                 .rank = options.rank,
                                 .world_size = options.world_size,
                                 .timeout = options.timeout,
                                 .store = options.store});
  return ProcessGroup::create(std::move(found.store), {.rank = found.rank,
                                                       .world_size = found.world_size,
                                                       .name = options.group_name,
                                                       .timeout = options.timeout,
                                                       .global_ranks = {},
                                                       .inter = options.inter,
                                                       .links = options.links,
                                                       .require_key = options.require_key});
}

}  // namespace libddp
