#include "libddp/group/group_state.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "libddp/base/log.h"
#include "libddp/group/backend_registry.h"
#include "libddp/watchdog/flight_log_json.h"

namespace libddp {

void ProcessGroup::State::refuse_entry(const char* operation) const {
  if (!made.is_current()) {
    throw StateError(fmt::format(
        "{} {}: the group was made before this process (pid {}) was forked, and only its maker can "
        "use it. Hint: make groups after forking, or start workers with the 'spawn' method.",
        identity.where(), operation, ::getpid()));
  }
  if (const std::string why = why_retired(); !why.empty()) {
    throw StateError(fmt::format("{} {}: {}", identity.where(), operation, why));
  }
  throw StateError(
      fmt::format("{} {}: the group has been shut down (destroy_process_group). Hint: call "
                  "init_process_group again; a model that was wrapped over this group goes on in "
                  "another one by its rejoin().",
                  identity.where(), operation));
}

BackendCall ProcessGroup::State::call(const OperationSite& site, OpKind kind, Dtype dtype,
                                      std::int64_t count, const CallOptions& options) const {
  BackendCall call;
  call.device = site.device.value_or(c10::kCPU);
  if (!call.device.is_cpu()) check_moves(site, call.device);
  call.description.is_on_device = !call.device.is_cpu();
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

BackendCall ProcessGroup::State::call(const OperationSite& site, OpKind kind,
                                      const Operand& operand, const CallOptions& options) const {
  BackendCall result = call(site, kind, operand.dtype, operand.wire.numel(), options);
  OpDescription& description = result.description;
  const at::IntArrayRef sizes = operand.wire.sizes();
  description.num_dims =
      static_cast<std::int32_t>(std::min<std::size_t>(sizes.size(), OpDescription::kMaxDims));
  std::copy_n(sizes.begin(), description.num_dims, description.shape);
  return result;
}

bool ProcessGroup::State::moves(c10::DeviceType type) const {
  if (backend->moves(type)) return true;
  const Backend* const known = known_device_backend.load();
  return known != nullptr ? known->moves(type) : store && has_backend(type);
}

void ProcessGroup::State::take_device_backend(const CallSite& site,
                                              std::unique_ptr<Backend> given) {
  const std::lock_guard lock(life_mutex);
  if (device_backend) {
    throw StateError(
        fmt::format("{} {}: the group has a backend for device tensors already ({}). "
                    "Hint: choose it before the first of them is sent.",
                    site.group.where(), site.operation, device_backend->name()));
  }
  device_backend = std::move(given);
  known_device_backend.store(device_backend.get(), std::memory_order_release);
}

void ProcessGroup::State::check_moves(const OperationSite& site, c10::Device device) const {
  if (moves(device.type())) return;
  site.refuse(
      fmt::format("{} is on device {}, but this group's backend moves {}", site.first_argument(),
                  device.str(), backend->moves(c10::kCPU) ? "CPU tensors only" : "other tensors"),
      backend->moves(c10::kCPU) ? "call tensor.cpu() first"
                                : "move it to a device that " + backend->name() + " serves");
}

Backend& ProcessGroup::State::make_device_backend(c10::DeviceType type) {
  if (backend->moves(type)) return *backend;
  const std::lock_guard lock(life_mutex);
  if (!device_backend) {
    if (is_shut_down) refuse_entry("create");
    BackendRequest request{store, prefix, options, backend.get()};
    device_backend = create_backend(type, request);
    known_device_backend.store(device_backend.get(), std::memory_order_release);
  }
  return *device_backend;
}

std::optional<c10::Device> ProcessGroup::State::device_of_barrier() const {
  const Backend* const device = known_device_backend.load();
  return device != nullptr && device->has_met() ? device->device() : std::nullopt;
}

void ProcessGroup::State::shut_down() {
  const std::lock_guard lock(life_mutex);
  if (is_shut_down.exchange(true)) return;
  // Closed in any case: where an interrupt ends the wait, the group has failed and said so.
  struct Close {
    State& state;
    ~Close() {
      state.is_closed = true;
      // A FileStore removes its file when the last rank lets go.
      state.store.reset();
    }
  } close{*this};
  // What is in flight on a device needs the other ranks, of which the host's backend takes leave;
  // and they hear of it where a Ctrl-C ends that wait.
  std::exception_ptr interrupt;
  try {
    if (device_backend) device_backend->shutdown();
  } catch (...) {
    interrupt = std::current_exception();
    backend->abort("the shutdown was interrupted while operations were in flight");
  }
  backend->shutdown();
  if (interrupt) std::rethrow_exception(interrupt);
}

void ProcessGroup::State::retire(const std::string& reason) {
  if (!made.is_current()) refuse_entry("retire");
  {
    const std::lock_guard lock(retired_mutex);
    if (retired_because.empty()) retired_because = reason;
  }
  if (!is_closed && !is_idle()) {
    backend->abort(reason);
    if (Backend* const device = known_device_backend.load()) device->abort(reason);
  }
  shut_down();
}

bool ProcessGroup::State::is_idle() const {
  const Backend* const device = known_device_backend.load();
  return backend->is_idle() && (device == nullptr || device->is_idle());
}

void ProcessGroup::State::drop() noexcept {
  if (is_shut_down || std::uncaught_exceptions() > 0 || backend->failure() || !is_idle()) return;
  try {
    shut_down();
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "group_not_left_in_order",
        {{"group", identity.where()}, {"reason", error.what()}});
  }
}

std::string ProcessGroup::State::why_retired() const {
  const std::lock_guard lock(retired_mutex);
  return retired_because;
}

std::exception_ptr ProcessGroup::State::failure() const {
  const std::string why = why_retired();
  if (why.empty()) return backend->failure();
  return std::make_exception_ptr(StateError(fmt::format("{}: {}", identity.where(), why)));
}

std::string ProcessGroup::State::flight_log() const {
  std::string reason;
  try {
    if (const auto error = backend->failure()) std::rethrow_exception(error);
  } catch (const Error& error) {
    reason = error.what();
  }
  const FlightRecorder* const recorder = backend->flight_recorder();
  return recorder ? flight_log_json(*recorder, identity, reason) : "{}";
}

ProcessGroup::Options ProcessGroup::State::options_of_part(const std::vector<int>& ranks, int rank,
                                                           const std::string& name) const {
  Options part;
  part.rank = rank;
  part.world_size = static_cast<int>(ranks.size());
  part.name = name;
  part.timeout = timeout.load();
  part.host_identity = options.host_identity;
  part.inter = options.inter;
  part.links = options.links;
  for (const int member : ranks) {
    part.global_ranks.push_back(global_ranks[static_cast<std::size_t>(member)]);
  }
  return part;
}

at::Tensor ProcessGroup::State::flat_like(const at::Tensor& wire, std::int64_t numel) const {
  if (!wire.device().is_cpu()) return at::empty({numel}, wire.options());
  return backend->allocate({numel}, wire.scalar_type(), c10::kCPU);
}

}  // namespace libddp
