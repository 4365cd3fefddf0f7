#pragma once

// The accepting side of the connections within a host: takes processes of this user that say a
// whole hello, in the order in which they do. Used by meeting.cpp.
//
// Nobody is waited for, so a connection that says nothing holds up none that does. At most 256 may
// be without hello; the oldest gives way. Running out of descriptors drops a stranger, not the
// meeting. One line a second at most is logged about them.
// Thread rule: one thread.
//
//   UnixDoor door;
//   for (UnixGuest& guest : door.admit(std::chrono::milliseconds(100))) ...

#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {

struct UnixGuest {
  UniqueFd socket;
  Frame hello;
};

class UnixDoor {
 public:
  static constexpr FrameLimits kLimits{.max_bytes = 1024, .max_descriptors = 64};
  static constexpr std::size_t kMaxSilent = 256;
  /// Generous, as it costs little: a stopped process is a rank too.
  static constexpr std::chrono::seconds kPatience{30};

  UnixDoor() : listener_(UnixListener::open()) {}

  const std::string& name() const { return listener_.name(); }
  /// Those who have said their hello; waits for one at most `limit`.
  std::vector<UnixGuest> admit(std::chrono::milliseconds limit);

 private:
  struct Silent {
    UniqueFd socket;
    Deadline patience = Deadline::never();
  };

  void wait(std::chrono::milliseconds limit) const;
  void accept_some();
  bool hear(Silent& silent, std::vector<UnixGuest>& guests);
  void report(const std::string& reason);

  UnixListener listener_;
  std::deque<Silent> silent_;
  Deadline next_report_ = Deadline::after(std::chrono::milliseconds(0));
  long num_refused_ = 0;
};

}  // namespace libddp
