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

/// Shared with the worker, which may outlive the queue for the few instructions after a Work's
/// callback destroyed the group; `is_stopping` then keeps it from the communicator.
struct MessageQueue::State {
  GroupIdentity identity;
  Comm& comm;
  std::vector<std::string> peer_names;
  FlightRecorder& flight_recorder;
  Hooks hooks;

  std::mutex mutex;
  std::condition_variable changed;
  std::list<BatchPtr> active;
  /// No longer active, and their Works do not know yet: who is about to tell them.
  struct Finishing {
    std::thread::id thread;
    BatchPtr batch;
  };
  std::vector<Finishing> finishing;
  std::vector<bool> is_gone;
  bool is_driven = false;
  bool is_stopping = false;
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
  std::vector<Ending> retire(const std::vector<bool>& was_gone, bool moved);
  BatchPtr first_expired() const;
  BatchPtr first_unfinished() const;
  std::vector<Ending> retire_all(const std::exception_ptr& error);
  std::exception_ptr time_out(const MessageBatch& batch);
  std::exception_ptr give_up(const Ending& ending);
  std::exception_ptr group_error() const;
  std::exception_ptr gone_error(const MessageBatch& batch, int rank) const;
  std::exception_ptr poison();
  void finish(std::vector<Ending>& endings);
  static void work(const std::shared_ptr<State>& shared);
};

MessageQueue::MessageQueue(GroupIdentity identity, Comm& comm, std::vector<std::string> peer_names,
                           FlightRecorder& flight_recorder, Hooks hooks)
    : state_(new State{std::move(identity),
                       comm,
                       std::move(peer_names),
                       flight_recorder,
                       std::move(hooks),
                       {},
                       {},
                       {},
                       {},
                       {},
                       false,
                       false,
                       0,
                       {}}) {
  state_->is_gone.resize(static_cast<std::size_t>(state_->identity.world_size));
}

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

void MessageQueue::on_goodbye(int rank) {
  State& state = *state_;
  State::Lock lock(state.mutex);
  state.is_gone[static_cast<std::size_t>(rank)] = true;
  state.comm.wake_mail();
}

void MessageQueue::drain() {
  State& state = *state_;
  while (true) {
    BatchPtr batch;
    {
      State::Lock lock(state.mutex);
      if (state.worker.get_id() == std::this_thread::get_id()) return;
      batch = state.first_unfinished();
    }
    if (!batch) return;
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
  // Who has left on another host may have sent its last words on a slower connection.
  std::vector<bool> was_gone = is_gone;
  for (std::size_t rank = 0; rank < was_gone.size(); ++rank) {
    was_gone[rank] = was_gone[rank] && comm.has_read_all(static_cast<int>(rank));
  }
  std::vector<Comm::Transfer*> transfers;
  bool may_wait = true;
  for (const BatchPtr& batch : active) {
    batch->append_unfinished(transfers);
    may_wait = may_wait && !batch->first_missing(was_gone, identity.rank);
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
  std::vector<Ending> endings = error ? retire_all(error) : retire(was_gone, moved);
  if (const BatchPtr late = error || moved ? nullptr : first_expired()) {
    // Without the lock: the peers are asked where they are.
    lock.unlock();
    error = time_out(*late);
    lock.lock();
    const auto rest = retire_all(error);
    endings.insert(endings.end(), rest.begin(), rest.end());
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
  for (const Ending& ending : endings) {
    finishing.push_back({std::this_thread::get_id(), ending.batch});
  }
  if (!endings.empty()) changed.notify_all();
  lock.unlock();
  finish(endings);
  lock.lock();
  std::erase_if(finishing,
                [](const Finishing& entry) { return entry.batch->work->is_completed(); });
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

std::vector<MessageQueue::State::Ending> MessageQueue::State::retire(
    const std::vector<bool>& was_gone, bool moved) {
  std::vector<Ending> endings;
  for (auto entry = active.begin(); entry != active.end();) {
    MessageBatch& batch = **entry;
    std::exception_ptr error;
    std::optional<int> abandoned_by;
    const bool is_done = batch.is_done();
    if (!is_done && !moved) {
      // A peer that left had handed over everything first, and nothing moved since.
      if (const auto rank = batch.first_missing(was_gone, identity.rank)) {
        error = gone_error(batch, *rank);
        if (batch.is_awaited(was_gone)) abandoned_by = rank;
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
BatchPtr MessageQueue::State::first_unfinished() const {
  if (!active.empty()) return active.front();
  const auto self = std::this_thread::get_id();
  const auto found = std::find_if(finishing.begin(), finishing.end(), [&](const auto& entry) {
    return entry.thread != self && !entry.batch->work->is_completed();
  });
  return found == finishing.end() ? nullptr : found->batch;
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

std::exception_ptr MessageQueue::State::gone_error(const MessageBatch& batch, int rank) const {
  return std::make_exception_ptr(PeerError(
      fmt::format(
          "{} {}: {} has left the group (destroy_process_group) while this rank was waiting "
          "for it. Hint: let both sides finish their sends and receives before one leaves.",
          identity.where(), batch.work->description(), peer_names[static_cast<std::size_t>(rank)]),
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
