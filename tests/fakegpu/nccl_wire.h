#pragma once

// What mock NCCL's ranks and their server send each other, over connected Unix sockets of one
// machine: structures as they lie in memory.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/cuda/nccl_header.h"

namespace mock_nccl {

enum class Kind : std::int32_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv,
};

/// One call. Its payload follows the array of all.
struct WireCall {
  Kind kind;
  std::int32_t dtype;
  std::int32_t reduction;
  /// Root or peer.
  std::int32_t peer;
  /// As in the call.
  std::uint64_t count;
  std::uint64_t send_bytes;
  std::uint64_t recv_bytes;
};

/// The first words on a connection; the answer is a byte, once all have come.
struct WireHello {
  std::int32_t rank;
  std::int32_t num_ranks;
};

/// A name that no other process has, in Linux's abstract namespace.
std::string new_socket_name();
/// Both throw std::system_error; connecting waits for the listener's queue.
int listen_on(const std::string& name);
int connect_to(const std::string& name);

/// False: the other side is gone, or the socket was shut down.
bool send_all(int socket, const void* data, std::size_t bytes);
bool recv_all(int socket, void* data, std::size_t bytes);

}  // namespace mock_nccl
