#pragma once

// The backend for tensors of an accelerator: NCCL.
//
// NOTE [Streams]
// A synchronous call runs on the caller's current stream: it comes behind what was launched there
// before, and what follows comes behind it. An asynchronous one runs on the group's own stream,
// which waits for what the caller's current stream had by then; Work::wait lets the current stream
// wait for it. Nothing blocks the host, except a barrier. Operations of one communicator run in the
// order of the calls, whichever streams they are on.
//
// The communicator is made by the first collective: all ranks call it anyway, and the device is
// known then. A send or receive before that makes one of the two ranks. Who fails tells the host's
// backend, and the other way round; see NOTE [Failure of device operations].
// Thread rule: any thread; calls are issued one at a time.
//
//   NcclBackend backend({store, "libddp/world/", options, host}, c10::DeviceType::CUDA);
//   backend.all_reduce(std::move(call), tensor, 1.0)->wait();

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/base/group_identity.h"
#include "libddp/cuda/device_flights.h"
#include "libddp/cuda/nccl_api.h"
#include "libddp/cuda/nccl_communicator.h"
#include "libddp/group/backend.h"
#include "libddp/group/backend_registry.h"
#include "libddp/group/event_pool.h"
#include "libddp/group/list_backend.h"
#include "libddp/group/stream_work.h"

namespace libddp {

class NcclBackend final : public Backend, public ListBackend {
 public:
  /// REQUIRES: a host's backend in the request. Throws DeviceError where there is no NCCL to use.
  NcclBackend(const BackendRequest& request, c10::DeviceType type);
  /// Does not wait: what is in flight is aborted.
  ~NcclBackend() override;

  std::string name() const override { return "nccl"; }
  bool moves(c10::DeviceType type) const override { return type == type_; }
  std::optional<c10::Device> device() const override;
  void connect(c10::Device device) override;
  bool has_met() const override { return has_met_.load(std::memory_order_acquire); }
  WorkPtr all_reduce(BackendCall call, const at::Tensor& tensor, double scale) override;
  bool reduces_to_root() const override { return true; }
  WorkPtr reduce(BackendCall call, const at::Tensor& tensor, int root, double scale) override;
  WorkPtr broadcast(BackendCall call, const at::Tensor& tensor, int root) override;
  WorkPtr all_gather(BackendCall call, const at::Tensor& output, const at::Tensor& input) override;
  WorkPtr reduce_scatter(BackendCall call, const at::Tensor& output, const at::Tensor& input,
                         double scale) override;
  WorkPtr exchange(BackendCall call, std::vector<Exchange> parts) override;
  /// Grouped: NCCL makes one kernel of them.
  ListBackend* lists() override { return this; }
  WorkPtr all_reduce_each(BackendCall call, std::vector<at::Tensor> tensors, double scale) override;
  WorkPtr all_gather_each(BackendCall call, std::vector<BlockPair> pairs) override;
  WorkPtr reduce_scatter_each(BackendCall call, std::vector<BlockPair> pairs,
                              double scale) override;
  /// Blocks the host until all that the ranks had launched before on the current streams is done.
  WorkPtr barrier(BackendCall call) override;
  std::uint64_t sequence_number() const override { return sequence_.load(); }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) override;
  bool is_in_arena(const at::Tensor&) const override { return false; }
  void abort(const std::string& reason) noexcept override;
  bool is_idle() const override { return flights_->is_idle(); }
  std::exception_ptr failure() const override { return flights_->failure(); }
  void shutdown() override;

 private:
  /// A communicator and the stream of its asynchronous operations.
  struct Channel {
    std::shared_ptr<NcclCommunicator> communicator;
    c10::Stream stream;
    /// Where a caller's stream was when it called; asked for nothing once `stream` waits for it.
    EventPool::Handle begin;
    /// Of the operation issued last, which the next one on another stream waits for.
    std::shared_ptr<DeviceOperation> last{};
    bool is_last_captured = false;
  };
  /// What a call of NCCL needs.
  struct Launch {
    ncclComm_t comm;
    cudaStream_t stream;
    const OpDescription& description;
  };
  using Issue = c10::function_ref<ncclResult_t(const Launch&)>;
  using IssueOne = c10::function_ref<ncclResult_t(std::size_t)>;
  enum class Numbering { Collective, Message };

  /// `tensors`: what the operation uses.
  WorkPtr launch(BackendCall call, at::ArrayRef<at::Tensor> tensors, Issue issue,
                 Numbering numbering = Numbering::Collective,
                 StreamWork::Wait wait = StreamWork::Wait::Stream);
  /// Launches what the call adds to the operation, in its stream. What that throws comes back: the
  /// operation itself has been launched.
  static std::exception_ptr finish_on(const c10::Stream& stream, const BackendCall& call) noexcept;
  void issue_on(Channel& channel, const c10::Stream& stream, const BackendCall& call,
                std::uint64_t sequence, Issue issue);
  /// Those of a group, [0, count), up to the first that fails.
  ncclResult_t issue_together(std::size_t count, IssueOne one) const;
  ncclResult_t issue_parts(const Launch& launch, const std::vector<Exchange>& parts) const;
  /// Throws ArgumentError where NCCL cannot do it.
  void check_reduction_of(const BackendCall& call, double scale) const;
  /// The same, and adds what NCCL leaves of `scale`.
  void prepare_reduction(BackendCall& call, at::ArrayRef<at::Tensor> results, double scale) const;
  static void order_behind_last(Channel& channel, const c10::Stream& stream, bool captures);

  void use_device(c10::Device device);
  Channel& channel_of_all();
  Channel& channel_to(int peer);
  Channel join(const std::string& name, int rank, int world_size);
  std::string where(const BackendCall& call) const;

  const GroupIdentity identity_;
  const c10::DeviceType type_;
  const NcclApi& api_;
  Backend& host_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const std::chrono::milliseconds join_timeout_;
  /// LIBDDP_NCCL_TIMING: the flight log has the device's own times.
  const bool is_timed_;
  EventPool events_;
  const std::shared_ptr<DeviceFlights> flights_;

  /// Held while a call is issued: the order of the calls is that of the operations.
  std::mutex mutex_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<int> device_index_{-1};
  std::atomic<bool> has_met_{false};
  std::optional<Channel> all_;
  /// By peer: two ranks that talk before all have met.
  std::map<int, Channel> pairs_;
  at::Tensor barrier_;
};

}  // namespace libddp
