#include "libddp/transport/unix_door.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/log.h"

namespace libddp {
namespace {

constexpr int kMaxAcceptsOfARound = 256;
constexpr std::chrono::seconds kRefusalReportPeriod{1};

}  // namespace

std::vector<UnixGuest> UnixDoor::admit(std::chrono::milliseconds limit) {
  wait(limit);
  accept_some();
  std::vector<UnixGuest> guests;
  const std::size_t num_before = silent_.size();
  std::erase_if(silent_, [&](Silent& each) { return hear(each, guests); });
  // Half a hello makes its socket readable all the time.
  if (guests.empty() && num_before > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return guests;
}

void UnixDoor::wait(std::chrono::milliseconds limit) const {
  std::vector<pollfd> entries{{listener_.fd(), POLLIN, 0}};
  for (const Silent& each : silent_) entries.push_back({each.socket.get(), POLLIN, 0});
  ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

void UnixDoor::accept_some() {
  for (int i = 0; i < kMaxAcceptsOfARound; ++i) {
    UniqueFd socket = listener_.accept(std::chrono::milliseconds(0));
    if (!socket && !listener_.is_out_of_descriptors()) return;
    if (!socket || silent_.size() == kMaxSilent) {
      report(socket ? "too many connections without a hello" : "too many open files");
      if (!silent_.empty()) silent_.pop_front();
    }
    if (!socket) return std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const uid_t uid = peer_credentials(socket.get()).uid;
    if (uid == ::geteuid()) {
      silent_.push_back({std::move(socket), Deadline::after(kPatience)});
    } else {
      report(fmt::format("user {}", uid));
    }
  }
}

// True if the connection needs no more waiting: taken or refused.
bool UnixDoor::hear(Silent& silent, std::vector<UnixGuest>& guests) {
  try {
    if (!is_frame_complete(silent.socket.get(), kLimits)) {
      if (!silent.patience.expired()) return false;
      report("silence");
      return true;
    }
    Frame hello = receive_frame(silent.socket.get(), kLimits, silent.patience);
    guests.push_back({std::move(silent.socket), std::move(hello)});
  } catch (const NetworkError& error) {
    report(error.what());
  } catch (const TimeoutError& error) {
    report(error.what());
  }
  return true;
}

void UnixDoor::report(const std::string& reason) {
  ++num_refused_;
  if (!next_report_.expired()) return;
  next_report_ = Deadline::after(kRefusalReportPeriod);
  log(LogLevel::Warn, "meeting_connection_refused",
      {{"reason", reason}, {"num_refused", num_refused_}});
}

}  // namespace libddp
