#pragma once

// What a ProcessGroup holds, and the steps that its operations share. For process_group.cpp only.
// Thread rule: as ProcessGroup.
//
//   State& state = *state_;
//   OperationSite site = state.enter("all_reduce");
//   const Operand operand = make_operand(site, "tensor", tensor, Access::ReadWrite);
//   BackendCall call = state.call(site, OpKind::AllReduce, operand, options);
//   return state.issue(std::move(call), tensor, &Backend::all_reduce, operand.wire, 1.0);

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/group_identity.h"
#include "libddp/base/process.h"
#include "libddp/group/operand.h"
#include "libddp/group/operation_site.h"
#include "libddp/group/process_group.h"
#include "libddp/group/profiler_event.h"
#include "libddp/group/validation.h"

namespace libddp {

struct ProcessGroup::State {
  GroupIdentity identity;
  std::vector<int> global_ranks;
  c10::intrusive_ptr<c10d::Store> store;
  /// Of the store's keys that belong to this group alone.
  std::string prefix;
  /// What it was made with.
  Options options;
  std::atomic<std::chrono::milliseconds> timeout{};
  /// Of CPU tensors; of all tensors in a group over another library's.
  std::unique_ptr<Backend> backend;
  const ProcessStamp made;
  std::mutex life_mutex;
  /// Of the accelerator's tensors, made for the first of them: a process has one kind of them.
  std::unique_ptr<Backend> device_backend;
  std::atomic<Backend*> known_device_backend{nullptr};
  /// A shutdown has begun: no call may.
  std::atomic<bool> is_shut_down{false};
  /// It is over: there is nothing to abort any more.
  std::atomic<bool> is_closed{false};
  std::string why_retired() const;
  /// Why calls are refused since then, where it was no shutdown of the user's; else empty.
  mutable std::mutex retired_mutex;
  std::string retired_because;

  bool is_alone() const { return identity.world_size == 1; }

  /// Throws StateError in a forked child and after shutdown.
  OperationSite enter(const char* operation) const {
    if (made.is_current() && !is_shut_down.load(std::memory_order_relaxed)) [[likely]] {
      return {{identity, operation}};
    }
    refuse_entry(operation);
  }
  [[noreturn]] void refuse_entry(const char* operation) const;

  /// A call described by `operand`: its dtype, number of elements and the user's shape.
  BackendCall call(const OperationSite& site, OpKind kind, const Operand& operand,
                   const CallOptions& options) const;
  /// The same for several tensors, of which only the number of elements counts.
  BackendCall call(const OperationSite& site, OpKind kind, Dtype dtype, std::int64_t count,
                   const CallOptions& options) const;

  /// Every operation passes here on its way to the backend: `launch`, a method of Backend or a
  /// function that gets one, with the call and `args`. `inputs`: whose shapes a profiler shows.
  template <typename Launch, typename... Args>
  WorkPtr issue(BackendCall&& call, at::ArrayRef<at::Tensor> inputs, Launch&& launch,
                Args&&... args) {
    Backend& to = backend_for(call.device);
    ProfilerEvent event(call.description, inputs);
    return event.end_with(std::invoke(launch, to, std::move(call), std::forward<Args>(args)...));
  }

  /// REQUIRES: check_moves.
  Backend& backend_for(c10::Device device) {
    if (device.is_cpu()) [[likely]]
      return *backend;
    Backend* const known = known_device_backend.load(std::memory_order_acquire);
    return known != nullptr ? *known : make_device_backend(device.type());
  }
  bool moves(c10::DeviceType type) const;
  /// Throws StateError where there is one.
  void take_device_backend(const CallSite& site, std::unique_ptr<Backend> given);
  /// Throws ArgumentError where nothing moves tensors on `device`.
  void check_moves(const OperationSite& site, c10::Device device) const;
  Backend& make_device_backend(c10::DeviceType type);
  /// A barrier goes through the device once all ranks have met there: all that was launched before
  /// is then done on every rank.
  std::optional<c10::Device> device_of_barrier() const;
  void shut_down();
  /// Whether nothing is in flight, on the host and on a device.
  bool is_idle() const;
  /// See ProcessGroup::retire.
  void retire(const std::string& reason);
  /// The group's owner lets go of it. With nothing in flight and no exception on its way, as at the
  /// end of a program that succeeds, the rank leaves in order; else its peers take it for a
  /// failure.
  void drop() noexcept;
  std::string flight_log() const;
  /// See ProcessGroup.
  std::exception_ptr failure() const;
  /// Of a group of some of this one's ranks, in which this rank is `rank`.
  Options options_of_part(const std::vector<int>& ranks, int rank, const std::string& name) const;

  /// Flat tensor for `numel` elements as they travel: in the arena, or on the device.
  at::Tensor flat_like(const at::Tensor& wire, std::int64_t numel) const;
};

}  // namespace libddp
