#include "libddp/host/message_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/service_thread.h"
#include "libddp/host/message_batch.h"

namespace libddp {

using BatchPtr = std::shared_ptr<MessageBatch>;

namespace {

/// A rank that leaves says how far it is where nothing has moved for so long: mostly it has not to.
constexpr std::chrono::milliseconds kQuiet{200};
/// What both sides have a part of moves within that time, unless one of them is frozen.
constexpr std::chrono::seconds kStuck{5};
/// What a peer has received, it may say on a slower connection than that it is on its way out.
constexpr std::chrono::seconds kAckPatience{2};

}  // namespace

/// Shared with the worker, which may outlive the queue for the few instructions after a Work's
/// callback destroyed the group; `is_stopping` then keeps it from the communicator.
struct MessageQueue::State {
  State(GroupIdentity of, Comm& with, std::vector<std::string> names, FlightRecorder& recorder,
        Hooks calls)
      : identity(std::move(of)),
        comm(with),
        peer_names(std::move(names)),
        flight_recorder(recorder),
        hooks(std::move(calls)),
        peers(static_cast<std::size_t>(identity.world_size)) {}

  GroupIdentity identity;
  Comm& comm;
  std::vector<std::string> peer_names;
  FlightRecorder& flight_recorder;
  Hooks hooks;

  std::mutex mutex;
  std::condition_variable changed;
  std::list<BatchPtr> active;
  /// Who is about to tell the Works of what is no longer active, and to let go of its tensors.
  std::vector<std::thread::id> finishing;
  struct Peer {
    Departure departure;
    /// While its acks may be on the way.
    Deadline acks = Deadline::never();
  };
  std::vector<Peer> peers;
  bool is_driven = false;
  bool is_stopping = false;
  bool is_draining = false;
  Deadline quiet = Deadline::never();
  Deadline stuck = Deadline::never();
  /// What the peers know.
  Departure said;
  std::uint64_t num_posted = 0;
  std::thread worker;

  using Lock = std::unique_lock<std::mutex>;
  struct Ending {
    BatchPtr batch;
    std::exception_ptr error;
    /// Who left, where a rank that is there waits for a part that will not come.
    std::optional<int> abandoned_by;
  };

  void add(const BatchPtr& batch);
  void wait_for(const BatchPtr& batch);
  std::exception_ptr drive(Lock& lock);
  bool move_all(std::uint32_t ticket, const std::vector<Comm::Transfer*>& transfers, bool may_wait);
  void note_move();
  std::vector<Departure> current_departures() const;
  std::optional<Departure> news();
  std::vector<Ending> retire(const std::vector<Departure>& departures, bool moved);
  BatchPtr first_expired() const;
  bool is_finishing_elsewhere() const;
  std::vector<Ending> retire_all(const std::exception_ptr& error);
  std::exception_ptr time_out(const MessageBatch& batch);
  std::exception_ptr give_up(const Ending& ending);
  std::exception_ptr group_error() const;
  std::exception_ptr gone_error(const MessageBatch& batch, int rank, bool has_left) const;
  std::exception_ptr poison();
  void finish(std::vector<Ending>& endings);
  static void work(const std::shared_ptr<State>& shared);
};

MessageQueue::MessageQueue(GroupIdentity identity, Comm& comm, std::vector<std::string> peer_names,
                           FlightRecorder& flight_recorder, Hooks hooks)
    : state_(std::make_shared<State>(std::move(identity), comm, std::move(peer_names),
                                     flight_recorder, std::move(hooks))) {}

MessageQueue::~MessageQueue() {
  State& state = *state_;
  State::Lock lock(state.mutex);
  state.is_stopping = true;
  state.changed.notify_all();
  state.comm.wake_mail();
  if (state.worker.joinable()) {
    if (state.worker.get_id() == std::this_thread::get_id()) {
      state.worker.detach();
    } else {
      lock.unlock();
      state.worker.join();
      lock.lock();
    }
  }
  auto endings = state.retire_all(std::make_exception_ptr(StateError(fmt::format(
      "{}: the group was destroyed while a send or receive was in flight. Hint: wait for the work "
      "first.",
      state.identity.where()))));
  lock.unlock();
  state.finish(endings);
}

WorkPtr MessageQueue::post(BackendCall call, const std::vector<Exchange>& parts) {
  State& state = *state_;
  state.comm.throw_if_failed();
  const bool async = call.async;
  BatchPtr batch;
  {
    State::Lock lock(state.mutex);
    const FlightRecorder::Ticket ticket = state.flight_recorder.add_running(call.description, 0);
    batch = make_batch(std::move(call), parts, ++state.num_posted, std::nullopt);
    batch->ticket = ticket;
    if (async && !state.worker.joinable()) {
      state.worker =
          start_service_thread("libddp-messages", [shared = state_] { State::work(shared); });
    }
    state.add(batch);
  }
  if (!async) state.wait_for(batch);
  return batch->work;
}

void MessageQueue::run(const BackendCall& call, std::uint64_t sequence,
                       const std::vector<Exchange>& parts) {
  State& state = *state_;
  BackendCall own;
  own.description = call.description;
  own.timeout = call.timeout;
  // Users' tags are 0 and up. Numbers come round again long after the older transfer is done.
  const int tag = -1 - static_cast<int>(sequence % (1u << 30));
  const BatchPtr batch = make_batch(std::move(own), parts, sequence, tag);
  {
    State::Lock lock(state.mutex);
    state.add(batch);
  }
  state.wait_for(batch);
}

bool MessageQueue::is_idle() const {
  State::Lock lock(state_->mutex);
  return state_->active.empty();
}

void MessageQueue::on_departure(int rank, const Departure& departure) {
  State& state = *state_;
  State::Lock lock(state.mutex);
  State::Peer& peer = state.peers[static_cast<std::size_t>(rank)];
  if (peer.departure.has_left) return;
  peer = {departure, Deadline::after(kAckPatience)};
  state.comm.wake_mail();
}

void MessageQueue::drain() {
  State& state = *state_;
  {
    State::Lock lock(state.mutex);
    state.is_draining = true;
    state.note_move();
  }
  while (true) {
    BatchPtr batch;
    {
      State::Lock lock(state.mutex);
      if (state.worker.get_id() == std::this_thread::get_id()) return;
      if (!state.active.empty()) {
        batch = state.active.front();
      } else if (state.is_finishing_elsewhere()) {
        state.changed.wait_for(lock, kInterruptPeriod);
      } else {
        return;
      }
    }
    check_interrupt();
    if (!batch) continue;
    try {
      state.wait_for(batch);
    } catch (const Error&) {
      // The batch's own Work tells its owner; here only the end counts.
    }
  }
}

void MessageQueue::State::add(const BatchPtr& batch) {
  active.push_back(batch);
  changed.notify_all();
  // Wakes a driver that sleeps on the list as it was.
  if (is_driven) comm.wake_mail();
}

void MessageQueue::State::wait_for(const BatchPtr& batch) {
  Lock lock(mutex);
  while (!batch->is_retired) {
    if (!is_driven) {
      if (const auto foreign = drive(lock)) std::rethrow_exception(foreign);
      continue;
    }
    changed.wait_for(lock, kInterruptPeriod);
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  // Whoever waits for something else drives now.
  if (!active.empty()) changed.notify_all();
  lock.unlock();
  batch->work->wait();
}

/// One step. Returns an exception that is not the library's own (an interrupt) for the caller to
/// throw; the batches then get the group's error.
std::exception_ptr MessageQueue::State::drive(Lock& lock) {
  is_driven = true;
  const std::uint32_t ticket = comm.mail_ticket();
  const std::vector<Departure> departures = current_departures();
  std::vector<Comm::Transfer*> transfers;
  bool may_wait = true;
  for (const BatchPtr& batch : active) {
    batch->append_unfinished(transfers);
    may_wait = may_wait && !batch->first_missing(departures, identity.rank);
  }
  lock.unlock();

  bool moved = false;
  std::exception_ptr error;
  std::exception_ptr foreign;
  try {
    moved = move_all(ticket, transfers, may_wait);
  } catch (const Error&) {
    error = std::current_exception();
    poison();
  } catch (...) {
    foreign = std::current_exception();
    error = poison();
  }

  lock.lock();
  std::vector<Ending> endings = error ? retire_all(error) : retire(departures, moved);
  if (const BatchPtr late = error || moved ? nullptr : first_expired()) {
    // Without the lock: the peers are asked where they are.
    lock.unlock();
    error = time_out(*late);
    lock.lock();
    const auto rest = retire_all(error);
    endings.insert(endings.end(), rest.begin(), rest.end());
  }
  if (moved || !endings.empty()) note_move();
  if (const auto departure = news()) {
    lock.unlock();
    hooks.on_departure(*departure);
    lock.lock();
  }
  const auto awaited = std::find_if(endings.begin(), endings.end(),
                                    [](const Ending& ending) { return ending.abandoned_by; });
  if (awaited != endings.end()) {
    lock.unlock();
    error = give_up(*awaited);
    lock.lock();
    const auto rest = retire_all(error);
    endings.insert(endings.end(), rest.begin(), rest.end());
  }
  is_driven = false;
  if (endings.empty()) return foreign;
  const auto self = std::this_thread::get_id();
  finishing.push_back(self);
  changed.notify_all();
  lock.unlock();
  finish(endings);
  endings.clear();  // what they keep alive may end here, outside the lock
  lock.lock();
  finishing.erase(std::find(finishing.begin(), finishing.end(), self));
  if (is_draining) changed.notify_all();
  return foreign;
}

bool MessageQueue::State::move_all(std::uint32_t ticket,
                                   const std::vector<Comm::Transfer*>& transfers, bool may_wait) {
  // What has come counts, even if its sender is gone by now.
  if (transfers.empty() || comm.progress(transfers)) return true;
  comm.throw_if_failed();
  check_interrupt();
  if (may_wait) comm.wait_for_mail(ticket, kInterruptPeriod);
  return false;
}

void MessageQueue::State::note_move() {
  quiet = Deadline::after(kQuiet);
  stuck = Deadline::after(kStuck);
}

/// Of the peers, as far as nothing from them is on the way any more.
std::vector<Departure> MessageQueue::State::current_departures() const {
  std::vector<Departure> departures;
  for (std::size_t rank = 0; rank < peers.size(); ++rank) {
    Departure departure = peers[rank].departure;
    // Who leaves on another host may have sent its last words on a slower connection.
    const bool is_all_read = comm.has_read_all(static_cast<int>(rank));
    departure.has_left = departure.has_left && is_all_read;
    departure.receives_nothing =
        departure.receives_nothing && (is_all_read || peers[rank].acks.expired());
    // Neither does anything new, so nothing will move.
    if (said.is_stuck && departure.is_stuck) {
      departure.sends_nothing = departure.receives_nothing = true;
    }
    departures.push_back(departure);
  }
  return departures;
}

/// What the peers should know of a rank that wants to leave and may wait for them in vain. A send
/// is done when its receiver has all of it, so who has none left has nothing on the way either.
std::optional<Departure> MessageQueue::State::news() {
  if (!is_draining || active.empty() || !quiet.expired()) return std::nullopt;
  Departure departure{.sends_nothing = true, .receives_nothing = true, .is_stuck = stuck.expired()};
  for (const BatchPtr& batch : active) {
    if (batch->has_unfinished(/*is_send=*/true)) departure.sends_nothing = false;
    if (batch->has_unfinished(/*is_send=*/false)) departure.receives_nothing = false;
  }
  if (departure == said) return std::nullopt;
  said = departure;
  return departure;
}

std::vector<MessageQueue::State::Ending> MessageQueue::State::retire(
    const std::vector<Departure>& departures, bool moved) {
  std::vector<Ending> endings;
  for (auto entry = active.begin(); entry != active.end();) {
    MessageBatch& batch = **entry;
    std::exception_ptr error;
    std::optional<int> abandoned_by;
    const bool is_done = batch.is_done();
    if (!is_done && !moved) {
      // A peer that left had handed over everything first, and nothing moved since.
      if (const auto rank = batch.first_missing(departures, identity.rank)) {
        error = gone_error(batch, *rank, departures[static_cast<std::size_t>(*rank)].has_left);
        if (batch.is_awaited(departures)) abandoned_by = rank;
      }
    }
    if (!is_done && !error) {
      ++entry;
      continue;
    }
    batch.is_retired = true;
    endings.push_back({*entry, error, abandoned_by});
    entry = active.erase(entry);
  }
  return endings;
}

BatchPtr MessageQueue::State::first_expired() const {
  const auto late = std::find_if(active.begin(), active.end(),
                                 [](const BatchPtr& batch) { return batch->deadline.expired(); });
  return late == active.end() ? nullptr : *late;
}

/// What a drain has to wait for. A callback that drains does not wait for its own thread.
bool MessageQueue::State::is_finishing_elsewhere() const {
  const auto self = std::this_thread::get_id();
  return std::any_of(finishing.begin(), finishing.end(),
                     [&](std::thread::id thread) { return thread != self; });
}

std::vector<MessageQueue::State::Ending> MessageQueue::State::retire_all(
    const std::exception_ptr& error) {
  std::vector<Ending> endings;
  for (const BatchPtr& batch : active) {
    batch->is_retired = true;
    endings.push_back({batch, batch->is_done() ? nullptr : error, std::nullopt});
  }
  active.clear();
  return endings;
}

std::exception_ptr MessageQueue::State::time_out(const MessageBatch& batch) {
  const std::string notes = hooks.notes(batch.unfinished_ranks(identity.rank, identity.world_size));
  comm.fail(
      {GroupFailure::Kind::Timeout,
       fmt::format("{}: timed out after {:.1f} s waiting for {}{}. Hint: look at what that rank "
                   "is doing (same peer, tag and order of messages?), or pass a longer timeout",
                   batch.work->description(), std::chrono::duration<double>(batch.timeout).count(),
                   batch.unfinished_peers(peer_names), notes)});
  hooks.on_failure();
  return group_error();
}

/// The peers of its other parts would wait for ever: the group fails, so that they are told.
std::exception_ptr MessageQueue::State::give_up(const Ending& ending) {
  const int left = *ending.abandoned_by;
  comm.fail(
      {GroupFailure::Kind::Peer,
       fmt::format("{}: {} has left the group (destroy_process_group) in the middle of a "
                   "batch of messages of {}, which other ranks wait for too. Hint: let all "
                   "ranks finish their sends and receives before one leaves",
                   ending.batch->work->description(), peer_names[static_cast<std::size_t>(left)],
                   peer_names[static_cast<std::size_t>(identity.rank)]),
       left});
  hooks.on_failure();
  return group_error();
}

std::exception_ptr MessageQueue::State::group_error() const {
  try {
    comm.throw_if_failed();
  } catch (const Error&) {
    return std::current_exception();
  }
  return nullptr;
}

std::exception_ptr MessageQueue::State::gone_error(const MessageBatch& batch, int rank,
                                                   bool has_left) const {
  return std::make_exception_ptr(PeerError(
      fmt::format("{} {}: {} {} the group (destroy_process_group) {} this rank was waiting "
                  "for it. Hint: let both sides finish their sends and receives before one leaves.",
                  identity.where(), batch.work->description(),
                  peer_names[static_cast<std::size_t>(rank)], has_left ? "has left" : "leaves",
                  has_left ? "while" : "and has no part of what"),
      rank));
}

/// A step that throws leaves transfers half done, so the group cannot go on.
std::exception_ptr MessageQueue::State::poison() {
  if (!comm.failure()) {
    comm.fail({GroupFailure::Kind::Aborted,
               "a send or receive was interrupted. Hint: make a new group to go on"});
  }
  hooks.on_failure();
  return group_error();
}

void MessageQueue::State::finish(std::vector<Ending>& endings) {
  for (Ending& ending : endings) {
    MessageBatch& batch = *ending.batch;
    std::exception_ptr error = ending.error;
    if (!error && batch.on_success) {
      try {
        batch.on_success();
      } catch (...) {
        error = std::current_exception();
      }
    }
    flight_recorder.finish(batch.ticket, !error);
    batch.work->finish(error, error ? -1 : batch.source_rank());
  }
}

void MessageQueue::State::work(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  Lock lock(state.mutex);
  while (true) {
    state.changed.wait(
        lock, [&] { return state.is_stopping || (!state.is_driven && !state.active.empty()); });
    if (state.is_stopping) return;
    // An interrupt has reached the batches as the group's failure; here is nobody to throw to.
    static_cast<void>(state.drive(lock));
  }
}

}  // namespace libddp
