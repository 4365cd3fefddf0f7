#pragma once

// Stream sockets between processes of one host, in the abstract namespace (no file to clean up).
//
// Sockets are non-blocking and close-on-exec; every wait has a deadline, lets interrupts through
// and survives signals. A lost or misbehaving peer is a NetworkError, a passed deadline a
// TimeoutError; messages are clauses ("the connection was closed") that callers complete with who
// and where. Thread rule: one thread at a time per socket and direction.
//
//   UnixListener listener = UnixListener::open();
//   UniqueFd theirs = connect_unix(listener.name(), deadline);
//   UniqueFd mine = listener.accept(std::chrono::milliseconds(100));

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"

namespace libddp {

class UnixListener {
 public:
  /// Listens under a fresh random name.
  static UnixListener open();
  /// Listens under this name. Throws NetworkError if another process does.
  static UnixListener open_as(const std::string& name);

  /// Name for connect_unix; printable.
  const std::string& name() const { return name_; }
  int fd() const { return fd_.get(); }

  /// Next connection; empty if none comes within `limit`, or if there is no descriptor for it.
  UniqueFd accept(std::chrono::milliseconds limit = std::chrono::milliseconds(0));
  /// The last accept() found no descriptor or memory; the connection still waits.
  bool is_out_of_descriptors() const { return is_out_of_descriptors_; }

 private:
  UniqueFd fd_;
  std::string name_;
  bool is_out_of_descriptors_ = false;
};

/// Connects to a listener of this host and network namespace.
UniqueFd connect_unix(const std::string& name, Deadline deadline);

/// The process at the other end when the connection was made, as the kernel tells it.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
PeerCredentials peer_credentials(int socket);

/// Waits until `socket` has bytes, a connection or its end. False if `limit` passes first.
bool wait_readable(int socket, std::chrono::milliseconds limit);

/// True if the peer closed its end or is gone and no byte waits to be read.
bool is_closed(int socket);

}  // namespace libddp
