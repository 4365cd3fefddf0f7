#pragma once

// What a ProcessGroup holds, and the steps that its operations share. For process_group.cpp only.
// Thread rule: as ProcessGroup.
//
//   State& state = *state_;
//   const CallSite site = state.enter("all_reduce");
//   BackendCall call = state.call(site, OpKind::AllReduce, operand, options);
//   return state.issue(std::move(call), tensor, &Backend::all_reduce, operand.wire, 1.0);

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/group_identity.h"
#include "libddp/base/process.h"
#include "libddp/group/operand.h"
#include "libddp/group/process_group.h"
#include "libddp/group/profiler_event.h"
#include "libddp/group/validation.h"

namespace libddp {

struct ProcessGroup::State {
  GroupIdentity identity;
  std::vector<int> global_ranks;
  c10::intrusive_ptr<c10d::Store> store;
  std::string host_identity;
  InterEngine inter;
  LinkOptions links;
  std::atomic<std::chrono::milliseconds> timeout{};
  std::unique_ptr<Backend> backend;
  const ProcessStamp made;
  std::mutex life_mutex;
  /// A shutdown has begun: no call may.
  std::atomic<bool> is_shut_down{false};
  /// It is over: there is nothing to abort any more.
  std::atomic<bool> is_closed{false};

  bool is_alone() const { return identity.world_size == 1; }

  /// Throws StateError in a forked child and after shutdown.
  CallSite enter(const char* operation) const {
    if (made.is_current() && !is_shut_down.load(std::memory_order_relaxed)) [[likely]] {
      return {identity, operation};
    }
    refuse_entry(operation);
  }
  [[noreturn]] void refuse_entry(const char* operation) const;

  /// A call described by `operand`: its dtype, number of elements and the user's shape.
  BackendCall call(const CallSite& site, OpKind kind, const Operand& operand,
                   const CallOptions& options) const;
  /// The same for several tensors, of which only the number of elements counts.
  BackendCall call(const CallSite& site, OpKind kind, Dtype dtype, std::int64_t count,
                   const CallOptions& options) const;

  /// Every operation passes here on its way to the backend: `launch`, a method of Backend or a
  /// function that gets one, with the call and `args`. `inputs`: whose shapes a profiler shows.
  template <typename Launch, typename... Args>
  WorkPtr issue(BackendCall&& call, at::ArrayRef<at::Tensor> inputs, Launch&& launch,
                Args&&... args) const {
    ProfilerEvent event(call.description, inputs);
    return event.end_with(
        std::invoke(launch, *backend, std::move(call), std::forward<Args>(args)...));
  }

  /// Flat tensor in the arena for `numel` elements as they travel.
  at::Tensor flat_like(const at::Tensor& wire, std::int64_t numel) const;
};

}  // namespace libddp
