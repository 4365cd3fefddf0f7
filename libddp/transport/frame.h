#pragma once

// Frames on a stream between two processes of a host: a 12-byte header, then the bytes. Descriptors
// travel with the first byte. Errors as in unix_socket.h. Thread rule: one sender and one receiver
// at a time per socket.
//
//   send_frame(socket, "hello", {memory_fd}, deadline);
//   Frame frame = receive_frame(other_end, {}, deadline);

#include <cstddef>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"

namespace libddp {

/// One message between two ends.
struct Frame {
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};

/// What a receiver takes; more is a NetworkError before any memory is set aside.
struct FrameLimits {
  std::size_t max_bytes = 64u << 10;
  /// The kernel passes at most 253 at once.
  std::size_t max_descriptors = 16;
};

/// Sends `bytes` and duplicates of `descriptors` as one frame.
void send_frame(int socket, const std::string& bytes, const std::vector<int>& descriptors,
                Deadline deadline);

/// Whether receive_frame would not have to wait. Throws NetworkError for a closed connection, and
/// for what is no frame within the limits.
bool is_frame_complete(int socket, const FrameLimits& limits);

Frame receive_frame(int socket, const FrameLimits& limits, Deadline deadline);

}  // namespace libddp
