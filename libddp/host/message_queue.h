#pragma once

// Point-to-point transfers of one rank: many in flight, none blocks another or a collective.
//
// All unfinished transfers stand in one list. Whoever waits moves all of them ("drives"), one
// thread at a time: a synchronous send on an idle queue is driven by its caller, without a
// hand-off; what is in flight when nobody waits is driven by a worker thread that the first
// asynchronous call starts. Thread rule: any thread.
//
//   WorkPtr work = messages.post(std::move(call), {{Exchange::Direction::Send, tensor, 1, 0}});

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/base/group_identity.h"
#include "libddp/collectives/comm.h"
#include "libddp/group/backend.h"
#include "libddp/watchdog/departure.h"
#include "libddp/watchdog/flight_recorder.h"

namespace libddp {

class MessageQueue {
 public:
  struct Hooks {
    /// What else is known of ranks that did not come, for the message of a timeout; may take its
    /// time.
    std::function<std::string(const std::vector<int>& ranks)> notes;
    /// The group has failed here: tells the peers.
    std::function<void()> on_failure;
    /// This rank leaves, and waits for what peers may not do any more: tells them how far it is.
    std::function<void(const Departure& departure)> on_departure;
  };

  MessageQueue(GroupIdentity identity, Comm& comm, std::vector<std::string> peer_names,
               FlightRecorder& flight_recorder, Hooks hooks);
  /// Fails what is in flight; REQUIRES that the communicator has failed if something is. May run on
  /// the worker (from a callback of a Work).
  ~MessageQueue();
  MessageQueue(const MessageQueue&) = delete;
  MessageQueue& operator=(const MessageQueue&) = delete;

  /// One batch; the Work is done when all its parts are.
  WorkPtr post(BackendCall call, const std::vector<Exchange>& parts);
  /// The parts of a collective, under a tag that no user can choose; blocks.
  void run(const BackendCall& call, std::uint64_t sequence, const std::vector<Exchange>& parts);

  /// A peer leaves, or has left, in order: what still needs it fails.
  void on_departure(int rank, const Departure& departure);
  bool is_idle() const;
  /// For the end, after which the group posts nothing: waits until nothing is in flight. What a
  /// peer that leaves as well has no part for fails.
  void drain();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace libddp
