#include "libddp/host/host_backend.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/collectives/failure_latch.h"

namespace libddp {
namespace {

std::vector<std::string> names_of(const std::vector<GroupPeer>& peers) {
  std::vector<std::string> names;
  for (const GroupPeer& peer : peers) names.push_back(peer_name(peer));
  return names;
}

std::vector<pid_t> pids_of(const std::vector<GroupPeer>& peers) {
  std::vector<pid_t> pids;
  for (const GroupPeer& peer : peers) pids.push_back(peer.pid);
  return pids;
}

/// What a collective that makes common memory finds out. Its own, because an interrupted caller
/// does not wait for it: then it ends what it held.
struct SharedPlace {
  std::uint64_t offset = 0;
  std::shared_ptr<std::byte> block;
};

}  // namespace

HostBackend::HostBackend(GroupIdentity identity, std::shared_ptr<Arena> arena,
                         std::unique_ptr<Comm> comm, std::vector<GroupPeer> peers)
    : identity_(std::move(identity)),
      peer_names_(names_of(peers)),
      peer_pids_(pids_of(peers)),
      arena_(std::move(arena)),
      comm_(std::move(comm)),
      blocks_(std::make_shared<SharedBlocks>(arena_, comm_)),
      reporter_(identity_, peer_names_, *comm_, flight_recorder_, [this] { return watchdog(); }),
      notes_([this](const std::vector<int>& ranks) { return reporter_.where_are(ranks); }),
      messages_(std::make_unique<MessageQueue>(
          identity_, *comm_, peer_names_, flight_recorder_,
          MessageQueue::Hooks{notes_, [this] { tell_peers(); },
                              [this](const Departure& departure) { tell_departure(departure); }})),
      queue_(std::make_unique<WorkQueue>("libddp-queue")),
      running_call_([this] { return describe_running(); }) {
  std::lock_guard lock(watchdog_mutex_);
  watchdog_ = std::make_shared<Watchdog>(
      identity_, std::move(peers), *comm_,
      Watchdog::Hooks{[this](int rank, std::uint64_t sequence, const std::string& error) {
                        on_goodbye(rank, sequence, error);
                      },
                      [this](int rank, const Departure& departure) {
                        messages_->on_departure(rank, departure);
                      },
                      [this](int rank, const LastCalls& calls) { on_calls(rank, calls); },
                      [this] { return running_.load(std::memory_order_relaxed); },
                      [this] { reporter_.report(/*waits=*/false); }});
}

HostBackend::~HostBackend() {
  living_.leave();
  // Wakes what is in flight, so that the queues end without waiting for a peer.
  if (!queue_->is_idle() || !messages_->is_idle()) {
    comm_->fail({GroupFailure::Kind::Aborted,
                 "the group was destroyed without shutdown (destroy_process_group)"});
  }
  // After a shutdown there is none.
  if (const auto watchdog = this->watchdog()) watchdog->say_dropped();
  stop_parts();
}

void HostBackend::join_living(const void* store, std::vector<int> global_ranks) {
  living_.join(store, std::move(global_ranks), [this] { return loss(); });
}

// See NOTE [The end].
void HostBackend::stop_parts() {
  if (const auto watchdog = this->watchdog()) watchdog->stop();
  queue_.reset();
  messages_.reset();
  const std::lock_guard lock(watchdog_mutex_);
  watchdog_.reset();
}

// Runs in the watchdog's thread of some group.
RunningCallText HostBackend::describe_running() {
  constexpr std::size_t kMostNames = 4;
  RunningCallText text{identity_.name, "", {}};
  const std::uint64_t running = running_.load();
  if (running == 0) return text;
  text.call = comm_->last_call_of(identity_.rank);
  const std::lock_guard lock(watchdog_mutex_);
  for (int rank = 0; watchdog_ && rank < identity_.world_size; ++rank) {
    if (rank == identity_.rank || text.waits_for.size() == kMostNames) continue;
    const std::uint64_t last = watchdog_->last_sequence_of(rank).value_or(0);
    if (last < running) text.waits_for.push_back(peer_names_[static_cast<std::size_t>(rank)]);
  }
  return text;
}

std::shared_ptr<Watchdog> HostBackend::watchdog() const {
  const std::lock_guard lock(watchdog_mutex_);
  return watchdog_;
}

template <typename Operation>
void HostBackend::perform(const BackendCall& call, std::uint64_t sequence,
                          FlightRecorder::Ticket ticket, const Operation& operation) {
  CommCall comm_call{call.description, sequence};
  comm_call.timeout = call.timeout;
  comm_call.notes = &notes_;
  // Before looking who has left: on_goodbye does the two in the other order.
  running_.store(sequence);
  if (sequence >= goes_on_at_.load(std::memory_order_relaxed)) retract_error();
  try {
    if (sequence > last_common_.load()) throw_if_left(comm_call);
    operation(comm_call);
  } catch (...) {
    running_.store(0, std::memory_order_relaxed);
    flight_recorder_.finish(ticket, false);
    fail_after_exception(comm_call);
    throw;
  }
  running_.store(0, std::memory_order_relaxed);
  // For the other ranks the collective is over: the group goes on where this one's copy fails.
  try {
    if (call.on_success) call.on_success();
  } catch (...) {
    flight_recorder_.finish(ticket, false);
    throw;
  }
  flight_recorder_.finish(ticket, true);
}

void HostBackend::wait_for_all(std::chrono::milliseconds timeout) {
  BackendCall call;
  call.description.kind = OpKind::Barrier;
  call.timeout = timeout;
  perform(call, 0, 0, [this](const CommCall& comm_call) { comm_->barrier(comm_call); });
}

template <typename Operation>
WorkPtr HostBackend::launch(BackendCall call, Operation operation) {
  if (!call.async) {
    if (const auto sequence = queue_->try_begin()) {
      WorkQueue::Turn turn(*queue_);
      perform(call, *sequence, flight_recorder_.add_running(call.description, *sequence),
              operation);
      return Work::finished(call.description, *sequence, std::move(call.results));
    }
  } else {
    comm_->throw_if_failed();
  }
  const bool async = call.async;
  WorkPtr work;
  queue_->enqueue([&](std::uint64_t sequence) -> WorkQueue::Job {
    work = std::make_shared<Work>(call.description, sequence, std::move(call.results));
    const FlightRecorder::Ticket ticket = flight_recorder_.add(call.description, sequence);
    return
        [this, sequence, ticket, work, call = std::move(call), operation = std::move(operation)] {
          std::exception_ptr error;
          flight_recorder_.start(ticket);
          try {
            perform(call, sequence, ticket, operation);
          } catch (...) {
            error = std::current_exception();
          }
          const WorkQueue::CallbackScope callbacks;
          work->finish(error);
        };
  });
  if (!async) work->wait();
  return work;
}

void HostBackend::throw_if_left(const CommCall& call) {
  comm_->throw_if_failed(&call);
  comm_->fail(left_failure(first_to_leave_.load(), last_common_.load(),
                           call.description.to_string(call.sequence)));
  comm_->throw_if_failed(&call);
}

void HostBackend::on_goodbye(int rank, std::uint64_t sequence, const std::string& error) {
  if (sequence < last_common_.load()) {
    {
      const std::lock_guard lock(leaving_mutex_);
      leaving_error_ = error;
    }
    first_to_leave_.store(rank);
    last_common_.store(sequence);
  }
  if (running_.load() > sequence) {
    comm_->fail(left_failure(rank, sequence, comm_->last_call_of(identity_.rank)));
    tell_peers();
  }
  messages_->on_departure(rank, {.has_left = true});
}

GroupFailure HostBackend::left_failure(int rank, std::uint64_t last,
                                       const std::string& what) const {
  const auto index = static_cast<std::size_t>(rank);
  std::string when = fmt::format("after its collective #{}", last);
  if (last == 0) {
    when = "before its first collective";
  } else if (comm_->last_sequence_of(rank)) {
    when = "after " + comm_->last_call_of(rank);  // ranks of one host see each other's calls
  }
  std::string because;
  {
    const std::lock_guard lock(leaving_mutex_);
    if (!leaving_error_.empty()) because = " because of an error: " + leaving_error_;
  }
  return {GroupFailure::Kind::Peer,
          fmt::format("{}: {} has left the group (destroy_process_group) {}{}. Hint: every rank "
                      "must issue the same collectives before it leaves",
                      what, peer_names_[index], when, because),
          rank, peer_pids_[index]};
}

void HostBackend::fail_after_exception(const CommCall& call) noexcept {
  // Half a collective cannot be taken back, so a foreign exception (Ctrl-C) ends the group too.
  if (!comm_->failure()) {
    comm_->fail({GroupFailure::Kind::Aborted,
                 fmt::format("{}: was interrupted. Hint: make a new group to go on",
                             call.description.to_string(call.sequence))});
  }
  tell_peers();
}

void HostBackend::tell_departure(const Departure& departure) noexcept {
  if (const auto watchdog = this->watchdog()) watchdog->say_leaving(departure);
}

void HostBackend::tell_peers(bool waits) noexcept {
  const auto failure = comm_->failure();
  if (!failure) return;
  {
    std::lock_guard lock(watchdog_mutex_);
    if (watchdog_) watchdog_->announce(*failure);
  }
  reporter_.report(waits);
}

WorkPtr HostBackend::all_reduce(BackendCall call, const at::Tensor& tensor, double scale) {
  return launch(std::move(call), [this, tensor, scale](const CommCall& comm_call) {
    comm_->all_reduce(comm_call, tensor.data_ptr(), scale);
  });
}

WorkPtr HostBackend::broadcast(BackendCall call, const at::Tensor& tensor, int root) {
  return launch(std::move(call), [this, tensor, root](const CommCall& comm_call) {
    comm_->broadcast(comm_call, tensor.data_ptr(), tensor.nbytes(), root);
  });
}

WorkPtr HostBackend::all_gather(BackendCall call, const at::Tensor& output,
                                const at::Tensor& input) {
  return launch(std::move(call), [this, output, input](const CommCall& comm_call) {
    comm_->all_gather(comm_call, input.const_data_ptr(), output.data_ptr(), input.nbytes());
  });
}

WorkPtr HostBackend::reduce_scatter(BackendCall call, const at::Tensor& output,
                                    const at::Tensor& input, double scale) {
  return launch(std::move(call), [this, output, input, scale](const CommCall& comm_call) {
    comm_->reduce_scatter(comm_call, input.const_data_ptr(), output.data_ptr(),
                          static_cast<std::uint64_t>(output.numel()), scale);
  });
}

WorkPtr HostBackend::exchange(BackendCall call, std::vector<Exchange> parts) {
  const OpKind kind = call.description.kind;
  if (kind == OpKind::Send || kind == OpKind::Recv) return messages_->post(std::move(call), parts);
  const auto timeout = call.timeout;
  return launch(std::move(call),
                [this, parts = std::move(parts), timeout](const CommCall& comm_call) {
                  exchange_now(comm_call, timeout, parts);
                });
}

void HostBackend::exchange_now(const CommCall& comm_call, std::chrono::milliseconds timeout,
                               const std::vector<Exchange>& parts) {
  comm_->barrier(comm_call);  // all ranks agree on the description
  BackendCall messages;
  messages.timeout = timeout;
  messages.description = comm_call.description;
  messages_->run(messages, comm_call.sequence, parts);
}

WorkPtr HostBackend::all_to_all(BackendCall call, const at::Tensor& output, const at::Tensor& input,
                                std::vector<Exchange> parts) {
  const auto timeout = call.timeout;
  return launch(std::move(call), [this, output, input, parts = std::move(parts),
                                  timeout](const CommCall& comm_call) {
    const auto block_bytes = input.nbytes() / static_cast<std::size_t>(identity_.world_size);
    const bool is_done =
        comm_->all_to_all(comm_call, input.const_data_ptr(), output.data_ptr(), block_bytes);
    if (!is_done) exchange_now(comm_call, timeout, parts);
  });
}

WorkPtr HostBackend::barrier(BackendCall call) {
  return launch(std::move(call), [this](const CommCall& comm_call) { comm_->barrier(comm_call); });
}

at::Tensor HostBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device) {
  const auto numel = static_cast<std::size_t>(c10::multiply_integers(sizes));
  std::shared_ptr<std::byte> block = arena_->allocate(numel * c10::elementSize(dtype));
  void* data = block.get();
  return at::from_blob(
      data, sizes, [block = std::move(block)](void*) mutable { block.reset(); },
      at::TensorOptions().dtype(dtype));
}

at::Tensor HostBackend::allocate_shared(BackendCall call, at::IntArrayRef sizes,
                                        at::ScalarType dtype) {
  if (comm_->name() != "host") return {};
  const std::size_t bytes =
      static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  // In turns, so that no rank's arena holds everything.
  const int owner = num_shared_.fetch_add(1) % identity_.world_size;
  const auto place = std::make_shared<SharedPlace>();
  if (owner == identity_.rank) place->offset = blocks_->make(bytes, identity_.world_size);
  call.async = false;
  launch(std::move(call), [this, place, owner, bytes](const CommCall& comm_call) {
    comm_->broadcast(comm_call, &place->offset, sizeof(place->offset), owner);
    place->block =
        blocks_->hold(comm_->memory_of(owner, place->offset, SharedBlocks::kHeadBytes + bytes));
  })->wait();
  std::shared_ptr<std::byte> block = std::move(place->block);
  void* data = block.get();
  return at::from_blob(
      data, sizes, [block = std::move(block)](void*) mutable { block.reset(); },
      at::TensorOptions().dtype(dtype));
}

bool HostBackend::is_in_arena(const at::Tensor& tensor) const {
  return arena_->offset_of(tensor.const_data_ptr(), tensor.nbytes()).has_value();
}

void HostBackend::abort(const std::string& reason) noexcept {
  comm_->fail({GroupFailure::Kind::Aborted, fmt::format("the group was aborted: {}", reason)});
  tell_peers(/*waits=*/false);  // a peer may have been earlier
}

void HostBackend::fail(const GroupFailure& failure) noexcept {
  comm_->fail(failure);
  tell_peers();
}

std::map<int, std::string> HostBackend::ask_where(const std::vector<int>& ranks,
                                                  std::chrono::milliseconds limit) {
  const auto watchdog = this->watchdog();
  return watchdog ? watchdog->ask_for_stacks(ranks, limit) : std::map<int, std::string>{};
}

void HostBackend::tell_calls(int rank, const LastCalls& calls) noexcept {
  if (const auto watchdog = this->watchdog()) watchdog->say_calls(rank, calls);
}

void HostBackend::hear_calls(std::function<void(int, const LastCalls&)> listener) {
  const std::lock_guard lock(listener_mutex_);
  listener_ = std::move(listener);
}

void HostBackend::on_calls(int rank, const LastCalls& calls) {
  const std::lock_guard lock(listener_mutex_);
  if (listener_) listener_(rank, calls);
}

void HostBackend::report_error(const std::string& what) noexcept {
  if (comm_->failure()) return;
  const std::uint64_t sequence = queue_->sequence();
  const std::lock_guard lock(watchdog_mutex_);
  if (!watchdog_) return;
  watchdog_->report_error(sequence, what);
  goes_on_at_.store(sequence + 1, std::memory_order_relaxed);
}

void HostBackend::retract_error() noexcept {
  if (goes_on_at_.load(std::memory_order_relaxed) == kNoReport) return;
  const std::lock_guard lock(watchdog_mutex_);
  goes_on_at_.store(kNoReport, std::memory_order_relaxed);
  if (watchdog_) watchdog_->retract_error();
}

std::exception_ptr HostBackend::failure() const {
  try {
    comm_->throw_if_failed();
  } catch (const Error&) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr HostBackend::loss() const {
  std::optional<GroupFailure> loss;
  if (const auto watchdog = this->watchdog()) loss = watchdog->loss();
  if (const auto failure = comm_->failure(); !loss && failure) {
    if (failure->kind == GroupFailure::Kind::Network) loss = *failure;
  }
  if (!loss) return nullptr;
  try {
    throw_failure(*loss, fmt::format("{}: {}", identity_.where(), loss->message));
  } catch (const Error&) {
    return std::current_exception();
  }
}

void HostBackend::shutdown() {
  living_.leave();
  std::exception_ptr interrupt;
  try {
    queue_->drain();
    messages_->drain();
  } catch (...) {
    // A Ctrl-C. The peers may wait for what is in flight here, which now ends as well.
    interrupt = std::current_exception();
    comm_->fail({GroupFailure::Kind::Aborted,
                 "the shutdown was interrupted while operations were in flight. Hint: wait for "
                 "them before destroy_process_group"});
    tell_peers();
  }
  // Not under the lock: others look here meanwhile, and a peer may take its time to listen.
  if (const auto watchdog = this->watchdog()) {
    comm_->finish_messages();
    watchdog->say_goodbye(queue_->sequence());
    watchdog->stop();
  }
  {
    const std::lock_guard lock(watchdog_mutex_);
    watchdog_.reset();
  }
  if (interrupt) std::rethrow_exception(interrupt);
}

}  // namespace libddp
