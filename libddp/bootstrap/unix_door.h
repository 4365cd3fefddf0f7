#pragma once

// The accepting side of the connections within a host: takes processes of this user that say a
// whole hello, in the order in which they do. Used by meeting.cpp. See strangers.h.
// Thread rule: one thread.
//
//   UnixDoor door;
//   for (UnixGuest& guest : door.admit(std::chrono::milliseconds(100))) ...

#include <chrono>
#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/strangers.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {

struct UnixGuest {
  UniqueFd socket;
  Frame hello;
};

class UnixDoor {
 public:
  static constexpr FrameLimits kLimits{.max_bytes = 1024, .max_descriptors = 64};
  /// Generous, as it costs little: a stopped process is a rank too.
  static constexpr std::chrono::seconds kPatience{30};

  UnixDoor();

  const std::string& name() const { return listener_.name(); }
  /// Those who have said their hello; waits for one at most `limit`.
  std::vector<UnixGuest> admit(std::chrono::milliseconds limit);
  /// Says in the log why a guest is not let in after all.
  void refuse(const std::string& reason) { strangers_.report(reason); }

 private:
  void wait(std::chrono::milliseconds limit) const;
  void hear(StrangerBase& stranger, std::vector<UnixGuest>& guests);

  UnixListener listener_;
  Strangers<StrangerBase> strangers_;
};

}  // namespace libddp
