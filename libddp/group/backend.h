#pragma once

// What moves bytes for a ProcessGroup on one kind of device. Arguments arrive validated and
// contiguous; a backend adds nothing to their meaning.
//
// A backend numbers its collectives 1, 2, ... in the order in which it runs them, which is the
// order of the calls: the number is part of what the ranks compare.
// Thread rule: any thread may call any member at any time.
//
//   BackendCall call{.description = describe(...), .timeout = group_timeout, .async = true};
//   call.results = {tensor};
//   WorkPtr work = backend->all_reduce(std::move(call), tensor, 1.0);

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/base/group_failure.h"
#include "libddp/base/group_identity.h"
#include "libddp/base/op_description.h"
#include "libddp/group/work.h"

namespace libddp {

class FlightRecorder;
struct LastCalls;
class ListBackend;

/// One operation on its way to a backend.
struct BackendCall {
  OpDescription description;
  std::chrono::milliseconds timeout{};
  /// false: the operation may run inline and the returned Work is already done.
  bool async = false;
  /// Where its tensors are; a call without any is for the CPU.
  c10::Device device = c10::kCPU;
  /// What Work::result shows; kept alive until the operation is done.
  std::vector<at::Tensor> results;
  /// Runs once the bytes have come, before the Work is done: copies into tensors that the backend
  /// could not write directly. Empty if there are none. On a device: runs when the operation has
  /// been issued, in the caller's thread, and what it launches follows the operation in its stream.
  std::function<void()> on_success;
};

/// One part of a batched exchange.
struct Exchange {
  enum class Direction { Send, Recv };
  Direction direction = Direction::Send;
  at::Tensor tensor;
  /// Rank in the group; -1 on a receive = any source.
  int peer = 0;
  int tag = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;
  /// Whether it takes tensors on devices of `type`.
  virtual bool moves(c10::DeviceType type) const { return type == c10::DeviceType::CPU; }
  /// Where its tensors are, as far as it is known yet.
  virtual std::optional<c10::Device> device() const { return c10::Device(c10::kCPU); }
  /// See ProcessGroup::connect.
  virtual void connect([[maybe_unused]] c10::Device device) {}
  /// Whether all ranks have come together in it, so that a barrier may go through it.
  virtual bool has_met() const { return true; }

  /// In place; `scale` multiplies the result.
  virtual WorkPtr all_reduce(BackendCall call, const at::Tensor& tensor, double scale) = 0;
  /// Whether `reduce` costs less than an all_reduce.
  virtual bool reduces_to_root() const { return false; }
  /// Only `root` gets the result; the others' tensors stay as they are. REQUIRES: reduces_to_root.
  virtual WorkPtr reduce(BackendCall call, const at::Tensor& tensor, [[maybe_unused]] int root,
                         double scale) {
    return all_reduce(std::move(call), tensor, scale);
  }
  virtual WorkPtr broadcast(BackendCall call, const at::Tensor& tensor, int root) = 0;
  /// `output` = world_size blocks shaped like `input`, flattened.
  virtual WorkPtr all_gather(BackendCall call, const at::Tensor& output,
                             const at::Tensor& input) = 0;
  virtual WorkPtr reduce_scatter(BackendCall call, const at::Tensor& output,
                                 const at::Tensor& input, double scale) = 0;
  /// A batch of sends and receives that runs as a whole; any order of the parts is safe. With the
  /// kind Send or Recv it is point to point: it concerns only the ranks named in `parts` and is
  /// not numbered. With any other kind it is a collective of all ranks, which agree on the
  /// description first. A rank never exchanges with itself.
  virtual WorkPtr exchange(BackendCall call, std::vector<Exchange> parts) = 0;
  /// Equal blocks of `input`, block r for rank r, into those of `output`; the own block is the
  /// caller's. `parts` says the same as messages.
  virtual WorkPtr all_to_all(BackendCall call, const at::Tensor& output, const at::Tensor& input,
                             std::vector<Exchange> parts) {
    (void)output, (void)input;
    return exchange(std::move(call), std::move(parts));
  }
  virtual WorkPtr barrier(BackendCall call) = 0;
  /// What it offers for several tensors at once; null: nothing.
  virtual ListBackend* lists() { return nullptr; }

  /// Number of the collective issued last; 0 before the first.
  virtual std::uint64_t sequence_number() const = 0;

  /// Uninitialised tensor in memory that the backend communicates fastest.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) = 0;
  /// Whether all bytes of a contiguous tensor lie in memory of that kind.
  virtual bool is_in_arena(const at::Tensor& tensor) const = 0;

  /// One tensor, uninitialised, that all ranks of the group have in common: what one writes the
  /// others see. A collective; undefined where the ranks have no memory in common.
  virtual at::Tensor allocate_shared([[maybe_unused]] BackendCall call,
                                     [[maybe_unused]] at::IntArrayRef sizes,
                                     [[maybe_unused]] at::ScalarType dtype) {
    return {};
  }

  /// A backend of the ranks in `ranks` alone, of which this one is; `part` is its place there.
  /// Called by all of them, and only by them. Null where the backend has no way to do it.
  virtual std::unique_ptr<Backend> split([[maybe_unused]] const std::vector<int>& ranks,
                                         [[maybe_unused]] const GroupIdentity& part) {
    return nullptr;
  }

  /// Ends every operation in flight, here and soon on the peers, with `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// The same, of what another backend of the group has met. Backends that know no other cause than
  /// an abort take it for one.
  virtual void fail(const GroupFailure& failure) noexcept { abort(failure.message); }
  /// Asks those ranks where they are: their threads, and the calls that run in their groups
  /// (watchdog/running_calls.h). Blocks for up to `limit`; answers by rank. Not where a backend
  /// cannot ask.
  virtual std::map<int, std::string> ask_where([[maybe_unused]] const std::vector<int>& ranks,
                                               [[maybe_unused]] std::chrono::milliseconds limit) {
    return {};
  }
  /// Tells a peer what this rank has called on its device, and takes what peers tell, in a thread
  /// of the backend's. Not where a backend cannot.
  virtual void tell_calls([[maybe_unused]] int rank,
                          [[maybe_unused]] const LastCalls& calls) noexcept {}
  virtual void hear_calls([[maybe_unused]] std::function<void(int, const LastCalls&)> listener) {}
  /// Null where none is kept.
  virtual FlightRecorder* flight_recorder() { return nullptr; }
  /// See ProcessGroup::waits.
  virtual void add_waits([[maybe_unused]] std::vector<std::int64_t>& by_rank) const {}
  /// See ProcessGroup. Backends that cannot tell their peers do nothing.
  virtual void report_error([[maybe_unused]] const std::string& what) noexcept {}
  virtual void retract_error() noexcept {}
  /// Whether no operation is in flight; also true where a backend cannot know.
  virtual bool is_idle() const { return true; }
  /// Null while the backend is healthy.
  virtual std::exception_ptr failure() const = 0;
  /// The first peer that ended without leaving or gives no sign of life (PeerError with its rank),
  /// or the network (NetworkError); also where the backend had failed of something else before.
  /// Null while there is none, and where a backend cannot know.
  virtual std::exception_ptr loss() const { return nullptr; }
  /// Orderly end of this rank: waits for operations in flight, then leaves.
  virtual void shutdown() = 0;
};

}  // namespace libddp
