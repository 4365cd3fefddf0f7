#pragma once

// A connection to another keeper whose far end is given up when nothing moves for a while, and that
// ends at once when this keeper does. Thread rule: one thread.
//
//   ReplicaStream stream(std::move(socket), stop.fd(), std::chrono::seconds(10));
//   stream.send(&request, sizeof(request));
//   stream.receive(&head, sizeof(head));

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "libddp/base/unique_fd.h"

namespace libddp {

class ReplicaStream {
 public:
  /// `stop_fd`: readable when this keeper ends.
  ReplicaStream(UniqueFd socket, int stop_fd, std::chrono::milliseconds patience);

  /// Throw NetworkError, TimeoutError with a clause; StateError when this keeper ends.
  void send(const void* data, std::size_t bytes);
  void receive(void* data, std::size_t bytes);
  /// At least one byte. REQUIRES space.
  std::size_t receive_some(std::span<std::byte> space);

 private:
  void wait(short events, const char* what);

  UniqueFd socket_;
  const int stop_fd_;
  const std::chrono::milliseconds patience_;
};

/// Waits for `events` of the socket until `patience` is over: false. Throws StateError when
/// `stop_fd` is readable.
bool wait_unless_stopped(int socket, short events, int stop_fd, std::chrono::milliseconds patience);

}  // namespace libddp
