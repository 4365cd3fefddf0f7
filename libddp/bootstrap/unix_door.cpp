#include "libddp/bootstrap/unix_door.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// While there are no descriptors, nothing tells that there is one again.
constexpr std::chrono::milliseconds kLongestWait{20};

}  // namespace

UnixDoor::UnixDoor()
    : listener_(UnixListener::open()),
      strangers_(kPatience, RefusalLog("meeting_connection_refused", listener_.name())) {}

std::vector<UnixGuest> UnixDoor::admit(std::chrono::milliseconds limit) {
  wait(limit);
  std::vector<UnixGuest> guests;
  const auto welcome = [&](StrangerBase& stranger) { hear(stranger, guests); };
  const bool had_strangers = strangers_.size() > 0;
  strangers_.hear_all(welcome);
  strangers_.accept_from(listener_, welcome);
  // Half a hello makes its socket readable all the time.
  if (guests.empty() && had_strangers) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return guests;
}

void UnixDoor::wait(std::chrono::milliseconds limit) const {
  std::vector<pollfd> entries;
  strangers_.add_polls(listener_.fd(), entries);
  if (entries.size() == strangers_.size()) limit = std::min(limit, kLongestWait);
  ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

void UnixDoor::hear(StrangerBase& stranger, std::vector<UnixGuest>& guests) {
  const int socket = stranger.socket.get();
  std::string reason;
  try {
    const uid_t uid = peer_credentials(socket).uid;
    if (uid != ::geteuid()) {
      reason = fmt::format("user {}", uid);
    } else if (is_frame_complete(socket, kLimits)) {
      Frame hello = receive_frame(socket, kLimits, stranger.patience);
      guests.push_back({std::move(stranger.socket), std::move(hello)});
      return;
    } else if (!stranger.patience.expired()) {
      return;
    } else {
      reason = "silence";
    }
  } catch (const NetworkError& error) {
    reason = error.what();
  } catch (const TimeoutError& error) {
    reason = error.what();
  }
  strangers_.report(reason);
  stranger.socket.reset();
}

}  // namespace libddp
