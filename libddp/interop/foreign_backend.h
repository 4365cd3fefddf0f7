#pragma once

// A c10d backend of another library behind libddp's Backend.
//
// Calls are passed on in the order in which they come, under one lock, because most libraries match
// calls by their order. The Works end in threads that wait for the other library's (C10dWaiters).
// Collectives that exchange blocks (gather, scatter, all_to_all, uneven all_gather) are its
// all-to-all with sizes, over bytes; sends and receives are its own.
//
// NOTE [Failure of another library]
// What it throws once an operation runs is the group's failure, as everywhere in libddp: the other
// ranks may be half way through. What it refuses at the call, before anything is sent, is not.
// An abort ends the Works here at once; whether the peers notice is the other library's.
//
// NOTE [Deadlines of another library]
// Each call is given its timeout, and mostly ends by it. Some libraries (MPI) have none: what has
// not ended a second after its time is given up here, as a TimeoutError of the group. Collectives
// run one after another, so the time of one counts from the end of the one before; messages wait
// for nobody. A thread of the other library may hang for good: it is left behind.
// Thread rule: any thread.
//
//   ForeignBackend backend(gloo, {"dp", 0, 2});
//   backend.all_reduce(std::move(call), tensor, 1.0);

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "libddp/base/group_identity.h"
#include "libddp/group/backend.h"
#include "libddp/interop/c10d_waiters.h"

namespace libddp {

class ForeignBackend final : public Backend {
 public:
  /// Parts meet over `store`; null = there are none. `devices`: whose tensors it takes; empty = all
  /// that a library of its name may take.
  ForeignBackend(c10::intrusive_ptr<c10d::Backend> inner, GroupIdentity identity,
                 c10::intrusive_ptr<c10d::Store> store = nullptr,
                 std::vector<c10::DeviceType> devices = {});
  /// Lets go of what is in flight.
  ~ForeignBackend() override;

  /// "c10d:gloo".
  std::string name() const override;
  bool moves(c10::DeviceType type) const override;
  WorkPtr all_reduce(BackendCall call, const at::Tensor& tensor, double scale) override;
  WorkPtr broadcast(BackendCall call, const at::Tensor& tensor, int root) override;
  WorkPtr all_gather(BackendCall call, const at::Tensor& output, const at::Tensor& input) override;
  WorkPtr reduce_scatter(BackendCall call, const at::Tensor& output, const at::Tensor& input,
                         double scale) override;
  WorkPtr exchange(BackendCall call, std::vector<Exchange> parts) override;
  WorkPtr barrier(BackendCall call) override;
  std::uint64_t sequence_number() const override;
  /// Ordinary memory: the other library has none of its own.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) override;
  bool is_in_arena(const at::Tensor&) const override { return false; }
  std::unique_ptr<Backend> split(const std::vector<int>& ranks, const GroupIdentity& part) override;
  void abort(const std::string& reason) noexcept override;
  /// On the host; what is ordered with a device's stream is the other library's.
  bool is_idle() const override { return waiters_->is_idle(); }
  std::exception_ptr failure() const override;
  void shutdown() override;

 private:
  struct State;
  struct Flight;
  using WorkHandle = c10::intrusive_ptr<c10d::Work>;

  /// `issue` passes the call on; `finish` runs when it has ended well.
  WorkPtr start(BackendCall call, bool is_numbered, const std::function<Flight()>& issue,
                std::function<void()> finish);
  /// The same on a device: stream-ordered, no thread waits.
  WorkPtr start_on_device(BackendCall call, bool is_numbered, const std::function<Flight()>& issue,
                          std::function<void()> finish);
  WorkPtr exchange_blocks(BackendCall call, const std::vector<Exchange>& parts);
  WorkPtr exchange_messages(BackendCall call, const std::vector<Exchange>& parts);

  const std::shared_ptr<State> state_;
  const std::vector<c10::DeviceType> devices_;
  /// Shared with works on a device, which may ask for it after the group has ended.
  const std::shared_ptr<C10dWaiters> waiters_ = std::make_shared<C10dWaiters>();
};

/// Null where the backend does not tell.
c10::intrusive_ptr<c10d::Backend::Options> backend_options(c10d::Backend& backend);

}  // namespace libddp
