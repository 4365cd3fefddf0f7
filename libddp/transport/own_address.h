#pragma once

// A socket at the one address of this host that a name means, for what is to be reached there and
// nowhere else. It is bound and does not listen yet.
//
// Thread rule: free function; any thread. Names are looked up, until the deadline at most.
//
//   OwnAddress own = bind_own_address("10.0.0.1", 29500, deadline);
//   if (own.socket) listen_with(own.socket.release());
//   else log_reason(own.reason);                  // empty = the port is taken, or may not be used

#include <cstdint>
#include <string>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"

namespace libddp {

struct OwnAddress {
  UniqueFd socket;
  /// Why no single address of this host is meant; empty if one is.
  std::string reason;
};

/// `host`: a numeric address or a name. "localhost" is 127.0.0.1 where that exists. Another name
/// that means loopback here means this host to others (Debian's 127.0.1.1), so it says nothing.
OwnAddress bind_own_address(const std::string& host, std::uint16_t port, Deadline deadline);

}  // namespace libddp
