#pragma once

// The backend for tensors in CPU memory: a communicator of the ranks of one host or several, a
// queue for collectives, one for messages, and a watchdog over the peers.
//
// NOTE [Failure]
// Whatever goes wrong (a peer's death, a mismatch, a timeout, an interrupt in the middle of a
// collective, abort) ends up in Comm::fail, which keeps the first cause and wakes every waiter
// here, and in Watchdog::announce, which tells the peers. Every later call throws that cause.
// A peer that leaves in order is no failure, unless a collective starts that it took no part in.
//
// NOTE [The end]
// Each part may call those behind it in this list, so they stop in this order, whoever ends the
// group and however: the watchdog (its hooks call the queues), the queue of collectives (it uses
// messages), the queue of messages, the control sockets (the queues tell the peers of failures),
// and with the members the memory, which all of them touch. Thread rule: any thread.
//
//   HostBackend backend(identity, arena, std::move(comm), std::move(peers));
//   backend.all_reduce(std::move(call), tensor, 1.0);

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libddp/base/group_identity.h"
#include "libddp/base/work_queue.h"
#include "libddp/collectives/comm.h"
#include "libddp/group/backend.h"
#include "libddp/host/failure_reporter.h"
#include "libddp/host/living_groups.h"
#include "libddp/host/message_queue.h"
#include "libddp/host/shared_blocks.h"
#include "libddp/memory/arena.h"
#include "libddp/watchdog/flight_recorder.h"
#include "libddp/watchdog/running_calls.h"
#include "libddp/watchdog/watchdog.h"

namespace libddp {

class HostBackend : public Backend {
 public:
  HostBackend(GroupIdentity identity, std::shared_ptr<Arena> arena, std::unique_ptr<Comm> comm,
              std::vector<GroupPeer> peers);
  /// Does not wait for peers; without a shutdown before, they take it for a failure.
  ~HostBackend() override;

  /// From now on groups that are being made over `store` (identity only) and need some of these
  /// ranks hear of this group's losses. Once.
  void join_living(const void* store, std::vector<int> global_ranks);
  /// The end of the creation: waits until all ranks have come so far. Not numbered.
  void wait_for_all(std::chrono::milliseconds timeout);

  std::string name() const override { return comm_->name(); }
  WorkPtr all_reduce(BackendCall call, const at::Tensor& tensor, double scale) override;
  WorkPtr broadcast(BackendCall call, const at::Tensor& tensor, int root) override;
  WorkPtr all_gather(BackendCall call, const at::Tensor& output, const at::Tensor& input) override;
  WorkPtr reduce_scatter(BackendCall call, const at::Tensor& output, const at::Tensor& input,
                         double scale) override;
  WorkPtr exchange(BackendCall call, std::vector<Exchange> parts) override;
  WorkPtr all_to_all(BackendCall call, const at::Tensor& output, const at::Tensor& input,
                     std::vector<Exchange> parts) override;
  WorkPtr barrier(BackendCall call) override;
  std::uint64_t sequence_number() const override { return queue_->sequence(); }
  FlightRecorder* flight_recorder() override { return &flight_recorder_; }
  void add_waits(std::vector<std::int64_t>& by_rank) const override { comm_->add_waits(by_rank); }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) override;
  bool is_in_arena(const at::Tensor& tensor) const override;
  at::Tensor allocate_shared(BackendCall call, at::IntArrayRef sizes,
                             at::ScalarType dtype) override;
  void abort(const std::string& reason) noexcept override;
  void fail(const GroupFailure& failure) noexcept override;
  std::map<int, std::string> ask_where(const std::vector<int>& ranks,
                                       std::chrono::milliseconds limit) override;
  void tell_calls(int rank, const LastCalls& calls) noexcept override;
  void hear_calls(std::function<void(int, const LastCalls&)> listener) override;
  void report_error(const std::string& what) noexcept override;
  void retract_error() noexcept override;
  bool is_idle() const override { return queue_->is_idle() && messages_->is_idle(); }
  std::exception_ptr failure() const override;
  std::exception_ptr loss() const override;
  void shutdown() override;

 private:
  static constexpr std::uint64_t kNobodyLeft = ~std::uint64_t{0};
  static constexpr std::uint64_t kNoReport = ~std::uint64_t{0};

  template <typename Operation>
  WorkPtr launch(BackendCall call, Operation operation);
  template <typename Operation>
  void perform(const BackendCall& call, std::uint64_t sequence, FlightRecorder::Ticket ticket,
               const Operation& operation);
  void exchange_now(const CommCall& comm_call, std::chrono::milliseconds timeout,
                    const std::vector<Exchange>& parts);
  void throw_if_left(const CommCall& call);
  void on_goodbye(int rank, std::uint64_t sequence, const std::string& error);
  void on_calls(int rank, const LastCalls& calls);
  /// `last`: the last collective that the rank took part in.
  GroupFailure left_failure(int rank, std::uint64_t last, const std::string& what) const;
  void fail_after_exception(const CommCall& call) noexcept;
  /// `waits`: an operation of this rank raises the failure.
  void tell_peers(bool waits = true) noexcept;
  void tell_departure(const Departure& departure) noexcept;
  void stop_parts();
  std::shared_ptr<Watchdog> watchdog() const;

  RunningCallText describe_running();

  const GroupIdentity identity_;
  const std::vector<std::string> peer_names_;
  const std::vector<pid_t> peer_pids_;
  std::shared_ptr<Arena> arena_;
  /// Shared with the tensors of allocate_shared, whose memory it maps.
  std::shared_ptr<Comm> comm_;
  std::shared_ptr<SharedBlocks> blocks_;
  std::atomic<int> num_shared_{0};
  /// Number of the collective that runs now; 0 = none.
  std::atomic<std::uint64_t> running_{0};
  /// Last collective of the peer that left first, and who that is.
  std::atomic<std::uint64_t> last_common_{kNobodyLeft};
  std::atomic<int> first_to_leave_{-1};
  /// What that one had announced before.
  mutable std::mutex leaving_mutex_;
  std::string leaving_error_;
  /// The first collective after the one that a reported error was announced after; kNoReport =
  /// none.
  std::atomic<std::uint64_t> goes_on_at_{kNoReport};
  mutable std::mutex watchdog_mutex_;
  std::mutex listener_mutex_;
  std::function<void(int, const LastCalls&)> listener_;
  std::shared_ptr<Watchdog> watchdog_;
  FlightRecorder flight_recorder_;
  FailureReporter reporter_;
  const std::function<std::string(const std::vector<int>&)> notes_;
  std::unique_ptr<MessageQueue> messages_;
  std::unique_ptr<WorkQueue> queue_;
  /// These two last: nobody asks any more once the rest is taken down.
  const RunningCall running_call_;
  LivingGroup living_;
};

}  // namespace libddp
