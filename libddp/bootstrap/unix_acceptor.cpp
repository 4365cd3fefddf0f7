#include "libddp/bootstrap/unix_acceptor.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/transport/frame.h"

namespace libddp {
namespace {

/// While there are no descriptors, nothing tells that there is one again.
constexpr std::chrono::milliseconds kLongestWait{20};

}  // namespace

UnixAcceptor::UnixAcceptor(UnixListener listener)
    : listener_(std::move(listener)),
      pending_(kPatience, RefusalLog("unix_refused", listener_.name())) {}

std::vector<AdmittedPeer> UnixAcceptor::admit(std::chrono::milliseconds limit) {
  wait(limit);
  std::vector<AdmittedPeer> all_admitted;
  const auto welcome = [&](PendingConnection& pending) { hear(pending, all_admitted); };
  const bool had_strangers = pending_.size() > 0;
  pending_.hear_all(welcome);
  pending_.accept_from(listener_, welcome);
  // Half a request makes its socket readable all the time.
  if (all_admitted.empty() && had_strangers)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return all_admitted;
}

void UnixAcceptor::wait(std::chrono::milliseconds limit) const {
  std::vector<pollfd> entries;
  pending_.add_polls(listener_.fd(), entries);
  if (entries.size() == pending_.size()) limit = std::min(limit, kLongestWait);
  ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

void UnixAcceptor::hear(PendingConnection& pending, std::vector<AdmittedPeer>& all_admitted) {
  const int socket = pending.socket.get();
  std::string reason;
  try {
    const uid_t uid = peer_credentials(socket).uid;
    if (uid != ::geteuid()) {
      reason = fmt::format("user {}", uid);
    } else if (is_frame_complete(socket, kLimits)) {
      Frame request = receive_frame(socket, kLimits, pending.patience);
      all_admitted.push_back({std::move(pending.socket), std::move(request)});
      return;
    } else if (!pending.patience.expired()) {
      return;
    } else {
      reason = "silence";
    }
  } catch (const NetworkError& error) {
    reason = error.what();
  } catch (const TimeoutError& error) {
    reason = error.what();
  }
  pending_.report(reason);
  pending.socket.reset();
}

}  // namespace libddp
