#pragma once

// Moves bytes over several sockets at once, in both directions, without waiting where others can
// go on.
//
// Words: *flow* = one stretch of memory on its way in one direction; `open` says how many of its
// bytes may move by now, so that a send can follow a computation and a receive can wait for room.
// *stream* = one of the sockets of a flow: stripes of kStripeBytes lie on them in turn, so the
// bytes of several streams come out of order, and `done` counts those before the first one that is
// missing. Thread rule: one thread.
//
//   LinkPump pump(watch);
//   LinkFlow& out = pump.add(fd, {.is_send = true, .data = p, .bytes = n, .open = n});
//   while (!out.is_done()) {
//     if (!pump.move()) pump.wait();
//   }

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"

namespace libddp {

struct FlowStream {
  int socket = -1;
  /// Place in the flow of the next byte that moves here.
  std::size_t at = 0;
};

struct LinkFlow {
  bool is_send = false;
  /// Which peer it goes to or comes from; for the LinkWatch only.
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t open = 0;
  std::size_t done = 0;
  /// `data` is a ring of so many bytes, a multiple of a stripe; 0 = it holds all bytes.
  std::size_t ring = 0;
  /// Set by LinkPump::add.
  std::vector<FlowStream> streams = {};

  bool is_done() const { return done == bytes; }
  bool can_move() const { return done < open; }
};

/// What a wait on the network watches beside the sockets.
class LinkWatch {
 public:
  virtual ~LinkWatch() = default;
  /// Throws when waiting is in vain (failure, deadline, interrupt). `flows` are what is waited for.
  virtual void check(const std::deque<LinkFlow>& flows) = 0;
  /// A connection of `flow` is lost; throws. `error`: of the call, 0 = the other side closed it.
  virtual void report_lost(const LinkFlow& flow, int socket, int error) = 0;
};

class LinkPump {
 public:
  static constexpr std::size_t kStripeBytes = 64u << 10;

  explicit LinkPump(LinkWatch& watch) : watch_(watch) {}

  /// The references stay valid. Both ends name the sockets in the same order.
  LinkFlow& add(int socket, LinkFlow flow);
  LinkFlow& add(const std::vector<UniqueFd>& sockets, LinkFlow flow);
  /// Moves what can move now; false if nothing could.
  bool move();
  /// Waits until a socket is ready, at most a short time, then lets the watch look.
  void wait();
  bool is_done() const;

 private:
  std::size_t move_some(LinkFlow& flow, FlowStream& stream);

  LinkWatch& watch_;
  std::deque<LinkFlow> flows_;
};

}  // namespace libddp
