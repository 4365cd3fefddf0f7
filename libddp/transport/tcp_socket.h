#pragma once

// TCP between hosts: listening on one numeric address, connecting with a deadline, and exact reads
// and writes of small things. Names are never looked up here.
//
// Sockets are non-blocking, close-on-exec and without Nagle's delay; every wait has a deadline and
// lets interrupts through. A lost peer is a NetworkError, a passed deadline a TimeoutError;
// messages are clauses that callers complete with who and where. Thread rule: one thread at a time
// per socket and direction.
//
//   TcpListener listener = TcpListener::open("10.0.0.1");
//   UniqueFd theirs = connect_tcp(listener.endpoint(), deadline);
//   UniqueFd mine = listener.accept();

#include <cstddef>
#include <cstdint>
#include <string>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"

namespace libddp {

/// A numeric IPv4 or IPv6 address and a port.
struct TcpEndpoint {
  std::string address;
  std::uint16_t port = 0;

  /// "10.0.0.1:4711", "[fd00::1]:4711".
  std::string to_string() const;
};

class TcpListener {
 public:
  /// Listens on a free port of `address`.
  static TcpListener open(const std::string& address);

  const TcpEndpoint& endpoint() const { return endpoint_; }
  int fd() const { return fd_.get(); }
  /// A connection that waits; empty if none does, or if there is no descriptor for it.
  UniqueFd accept();
  /// The last accept() found no descriptor or memory; the connection still waits.
  bool is_out_of_descriptors() const { return is_out_of_descriptors_; }

 private:
  UniqueFd fd_;
  TcpEndpoint endpoint_;
  bool is_out_of_descriptors_ = false;
};

UniqueFd connect_tcp(const TcpEndpoint& endpoint, Deadline deadline);

/// Lets the kernel end a connection within seconds when the other host is gone. For connections
/// that carry little and whose far end always reads.
void watch_liveness(int socket);

/// Shows firewalls and NATs that an idle connection is in use, and lets the kernel end it within 10
/// seconds when nothing comes through any more. For connections whose far end may be busy; what is
/// on its way on one that is dead shows in link_health.h.
void keep_alive(int socket);

void send_bytes(int socket, const void* data, std::size_t bytes, Deadline deadline);
void receive_bytes(int socket, void* data, std::size_t bytes, Deadline deadline);

}  // namespace libddp
