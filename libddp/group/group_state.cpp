#include "libddp/group/group_state.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace libddp {

void ProcessGroup::State::refuse_entry(const char* operation) const {
  if (!made.is_current()) {
    throw StateError(fmt::format(
        "{} {}: the group was made before this process (pid {}) was forked, and only its maker can "
        "use it. Hint: make groups after forking, or start workers with the 'spawn' method.",
        identity.where(), operation, ::getpid()));
  }
  throw StateError(
      fmt::format("{} {}: the group has been shut down (destroy_process_group). Hint: call "
                  "init_process_group again.",
                  identity.where(), operation));
}

BackendCall ProcessGroup::State::call(const CallSite& site, OpKind kind, Dtype dtype,
                                      std::int64_t count, const CallOptions& options) const {
  BackendCall call;
  call.description.kind = kind;
  call.description.dtype = dtype;
  call.description.count = static_cast<std::uint64_t>(count);
  call.description.num_dims = 1;
  call.description.shape[0] = count;
  if (!options.label.empty()) {
    const std::size_t size = std::min(options.label.size(), sizeof(call.description.label) - 1);
    std::memcpy(call.description.label, options.label.data(), size);
  }
  call.timeout = check_timeout(site, options.timeout, timeout.load(std::memory_order_relaxed));
  call.async = options.async;
  return call;
}

BackendCall ProcessGroup::State::call(const CallSite& site, OpKind kind, const Operand& operand,
                                      const CallOptions& options) const {
  BackendCall result = call(site, kind, operand.dtype, operand.wire.numel(), options);
  OpDescription& description = result.description;
  const at::IntArrayRef sizes = operand.wire.sizes();
  description.num_dims =
      static_cast<std::int32_t>(std::min<std::size_t>(sizes.size(), OpDescription::kMaxDims));
  std::copy_n(sizes.begin(), description.num_dims, description.shape);
  return result;
}

at::Tensor ProcessGroup::State::flat_like(const at::Tensor& wire, std::int64_t numel) const {
  return backend->allocate({numel}, wire.scalar_type());
}

}  // namespace libddp
