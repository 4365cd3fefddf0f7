#pragma once

// The control sockets to the peers of a group: what this rank tells them, without waiting for who
// does not read (control_outbox.h).
// Thread rule: sending from any thread; reading and the set of peers from one.
//
//   ControlChannels channels(std::move(peers), own_rank);
//   channels.send_to_all({.kind = ControlMessage::Kind::Goodbye, .sequence = 41});
//   channels.wait_until_sent(std::chrono::seconds(5));

#include <poll.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "libddp/base/event_fd.h"
#include "libddp/transport/group_peer.h"
#include "libddp/watchdog/control_message.h"
#include "libddp/watchdog/control_outbox.h"

namespace libddp {

class ControlChannels {
 public:
  class Channel {
   public:
    explicit Channel(GroupPeer of) : peer(std::move(of)) {}

    const GroupPeer peer;
    ControlInbox inbox;

   private:
    friend class ControlChannels;
    /// Under mutex_.
    ControlOutbox outbox_;
  };

  /// One channel to each of `peers` but the own rank. Throws Error where the system has no
  /// descriptors.
  ControlChannels(std::vector<GroupPeer> peers, int own_rank);

  std::deque<Channel>& all() { return channels_; }

  /// False if the peer is gone.
  bool send_to(Channel& channel, const ControlMessage& message) noexcept;
  void send_to_all(const ControlMessage& message) noexcept;
  /// Tells all what this rank's group failed of; only the first call does something, and whatever
  /// any thread says next comes after it.
  void announce(const GroupFailure& failure) noexcept;

  /// Entries for a poll that ends when a peer that took no message takes one again, or when a
  /// message waits that the polling thread does not know of.
  void add_polls(std::vector<pollfd>& entries) noexcept;
  /// After that poll: goes on with what waits.
  void after_poll() noexcept;
  void wait_until_sent(std::chrono::milliseconds limit) noexcept;

 private:
  bool send_locked(Channel& channel, const ControlMessage& message) noexcept;
  void add_unsent(std::vector<pollfd>& entries) noexcept;
  void flush() noexcept;

  std::deque<Channel> channels_;
  std::mutex mutex_;
  bool is_announced_ = false;
  /// Readable when a message waits that the polling thread does not know of.
  EventFd unsent_;
};

}  // namespace libddp
