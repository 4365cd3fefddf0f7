#include "libddp/keeper/replica_sender.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/service_thread.h"
#include "libddp/base/system_error.h"
#include "libddp/slots/slot.h"

namespace libddp {
namespace {

/// The longest sleep: deadlines need no more.
constexpr std::chrono::milliseconds kTurn{100};
/// Of one peer's bytes at a time, so that all get their turn.
constexpr std::size_t kPieceBytes = 1u << 20;

}  // namespace

LinkPlace replica_link_place() { return {.rank = 0, .kind = LinkKind::Control, .index = 0}; }

ReplicaSender::ReplicaSender(TcpListener listener, std::shared_ptr<const RunKey> key, Find find,
                             Options options)
    : options_(std::move(options)),
      endpoint_(listener.endpoint()),
      find_(std::move(find)),
      acceptor_(std::move(listener), replica_link_place().rank, LinkProver(std::move(key), {}),
                [this](const LinkPlace& place) {
                  const LinkPlace known = replica_link_place();
                  return place.rank == known.rank && place.kind == known.kind &&
                         place.index == known.index && peers_.size() < kMostPeers;
                }),
      limit_(options_.bytes_per_second) {
  thread_ = start_service_thread("libddp-replica", [this] { run(); });
}

ReplicaSender::~ReplicaSender() {
  stop_.set();
  thread_.join();
}

void ReplicaSender::run() {
  pollfd stop{stop_.fd(), POLLIN, 0};
  while (::poll(&stop, 1, 0) != 1) {
    wait();
    admit();
    for (Peer& peer : peers_) serve(peer);
    peers_.remove_if([](const Peer& peer) { return !peer.socket; });
    // Whoever was first comes last the next time: a rate is for all.
    if (peers_.size() > 1) peers_.splice(peers_.end(), peers_, peers_.begin());
  }
}

void ReplicaSender::wait() {
  std::vector<pollfd> entries{{stop_.fd(), POLLIN, 0}};
  acceptor_.add_polls(entries);
  const bool may_send = limit_.allowed() > 0;
  auto limit = kTurn;
  for (const Peer& peer : peers_) {
    if (peer.has_asked() && !peer.feed) {
      limit = std::min(limit, Slot::kReservedPause);
      continue;
    }
    const short events = !peer.feed ? POLLIN : may_send ? POLLOUT : 0;
    if (events == 0) limit = std::min(limit, limit_.pause());
    entries.push_back({peer.socket.get(), events, 0});
  }
  ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

void ReplicaSender::admit() {
  for (AdmittedLink& admitted : acceptor_.admit()) {
    Peer& peer = peers_.emplace_back();
    peer.socket = std::move(admitted.socket);
    peer.patience = Deadline::after(options_.patience);
  }
}

void ReplicaSender::serve(Peer& peer) {
  try {
    if (!peer.feed) hear(peer);
    if (peer.socket && peer.feed) feed(peer);
  } catch (const Error& error) {
    drop(peer, error.what());
  }
}

void ReplicaSender::hear(Peer& peer) {
  auto* request = reinterpret_cast<char*>(&peer.request);
  while (!peer.has_asked()) {
    const ssize_t got = ::recv(peer.socket.get(), request + peer.num_read,
                               sizeof(peer.request) - peer.num_read, MSG_DONTWAIT);
    if (got > 0) {
      peer.num_read += static_cast<std::size_t>(got);
      // An answer has to come before the peer gives up.
      if (peer.has_asked()) peer.patience = Deadline::after(options_.patience / 2);
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return peer.socket.reset();  // it has changed its mind
    if (errno != EAGAIN) throw NetworkError(errno_text("recv", errno));
    if (peer.patience.expired()) throw TimeoutError("it asked for nothing in time");
    return;
  }
  answer(peer);
}

void ReplicaSender::answer(Peer& peer) {
  peer.request.check();
  const ReplicaPlace place = peer.request.place();
  try {
    if (place.run != options_.run) throw SnapshotError("it is the keeper of another run");
    HeldSave held = find_(place);
    if (!held && !peer.patience.expired()) return;
    if (!held) throw SnapshotError("its writer has the slot reserved");
    peer.feed.emplace(std::move(held));
  } catch (const SnapshotError& error) {
    peer.feed.emplace(error.what());
  }
  peer.patience = Deadline::after(options_.patience);
}

void ReplicaSender::feed(Peer& peer) {
  std::size_t turn = kPieceBytes;
  while (!peer.feed->rest().empty() && turn > 0) {
    const std::size_t allowed = std::min(limit_.allowed(), turn);
    if (allowed == 0) {
      peer.patience = Deadline::after(options_.patience);  // it is not the peer that waits
      return;
    }
    const auto rest = peer.feed->rest();
    const ssize_t sent = ::send(peer.socket.get(), rest.data(), std::min(rest.size(), allowed),
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN) throw NetworkError(errno_text("send", errno));
    if (sent < 0) {
      if (peer.patience.expired()) {
        throw TimeoutError(fmt::format("it took nothing for {:g} s",
                                       std::chrono::duration<double>(options_.patience).count()));
      }
      return;
    }
    limit_.spend(static_cast<std::size_t>(sent));
    turn -= static_cast<std::size_t>(sent);
    peer.patience = Deadline::after(options_.patience);
    peer.feed->advance(static_cast<std::size_t>(sent));
  }
  if (peer.feed->rest().empty()) peer.socket.reset();
}

void ReplicaSender::drop(Peer& peer, const std::string& reason) {
  log(LogLevel::Warn, "replica_not_sent",
      {{"rank", peer.has_asked() ? peer.request.rank : -1}, {"reason", reason}});
  peer.feed.reset();
  peer.socket.reset();
}

}  // namespace libddp
