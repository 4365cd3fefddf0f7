#include "libddp/group/backend_registry.h"

#include <fmt/format.h>

#include <map>
#include <mutex>

#include "libddp/base/check.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<c10::DeviceType, BackendFactory> factories;
};

/// Made by whoever comes first: registrations run before main in no fixed order.
Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

BackendRegistration::BackendRegistration(c10::DeviceType device, BackendFactory factory) {
  const std::lock_guard lock(registry().mutex);
  const bool is_new = registry().factories.emplace(device, factory).second;
  LIBDDP_CHECK(is_new, "one backend per device");
}

bool has_backend(c10::DeviceType device) {
  const std::lock_guard lock(registry().mutex);
  return registry().factories.count(device) != 0;
}

std::unique_ptr<Backend> create_backend(c10::DeviceType device, const BackendRequest& request) {
  BackendFactory factory = nullptr;
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().factories.find(device);
    if (found != registry().factories.end()) factory = found->second;
  }
  if (factory == nullptr) {
    throw ArgumentError(
        fmt::format("libddp[group {}, rank {}/{}] create: this build of libddp moves no {} "
                    "tensors. Hint: build it with all of its rooms (LIBDDP_ONLY_ROOMS).",
                    request.options.name, request.options.rank, request.options.world_size,
                    c10::DeviceTypeName(device, /*lower_case=*/true)));
  }
  return factory(request);
}

}  // namespace libddp
