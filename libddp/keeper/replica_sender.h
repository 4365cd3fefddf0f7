#pragma once

// The side of a keeper that gives saves to keepers of other hosts: a listener and one thread, which
// serves all of them by turns, so that one that reads nothing holds up nobody.
//
// Nobody without the key gets further than the handshake (LinkAcceptor). Who has it may ask for one
// save per connection; its slot is held until the last byte is with the kernel, or the peer has
// taken nothing for `patience`. At most kMostPeers are served at a time.
// Thread rule: constructed and destroyed in one thread; `find` is called in the sender's.
//
//   ReplicaSender sender(TcpListener::open("10.0.0.1"), key, find, {.run = "job 7"});
//   publish(sender.endpoint().to_string());

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/event_fd.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/link_acceptor.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/keeper/held_save.h"
#include "libddp/keeper/rate_limit.h"
#include "libddp/keeper/replica_feed.h"
#include "libddp/keeper/replica_wire.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

class ReplicaSender {
 public:
  static constexpr std::size_t kMostPeers = 64;

  struct Options {
    std::string run;
    /// To all peers together; 0 = no limit.
    std::uint64_t bytes_per_second = 0;
    /// What a peer may take until it has taken, or asked for, something.
    std::chrono::milliseconds patience{10'000};
  };
  /// The save, held; nothing if it is to be asked again in a moment. Throws SnapshotError that says
  /// why not, for the peer.
  using Find = std::function<HeldSave(const ReplicaPlace&)>;

  /// `key`: of both keepers, for this purpose only.
  ReplicaSender(TcpListener listener, std::shared_ptr<const RunKey> key, Find find,
                Options options);
  /// Closes all connections.
  ~ReplicaSender();

  const TcpEndpoint& endpoint() const { return endpoint_; }

 private:
  struct Peer {
    UniqueFd socket;
    Deadline patience = Deadline::never();
    ReplicaRequest request;
    std::size_t num_read = 0;
    std::optional<ReplicaFeed> feed;

    bool has_asked() const { return num_read == sizeof(request); }
  };

  void run();
  void wait();
  void admit();
  void serve(Peer& peer);
  void hear(Peer& peer);
  void feed(Peer& peer);
  void answer(Peer& peer);
  void drop(Peer& peer, const std::string& reason);

  const Options options_;
  const TcpEndpoint endpoint_;
  const Find find_;
  LinkAcceptor acceptor_;
  RateLimit limit_;
  std::list<Peer> peers_;
  EventFd stop_ = EventFd::create();
  std::thread thread_;
};

/// Which connections keepers make to each other, for the handshake.
LinkPlace replica_link_place();

}  // namespace libddp
