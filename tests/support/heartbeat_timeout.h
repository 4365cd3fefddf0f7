#pragma once

// LIBDDP_HEARTBEAT_TIMEOUT for a scope; no rank runs when it begins or ends.

#include <cstdlib>

namespace libddp::test {

class HeartbeatTimeout {
 public:
  explicit HeartbeatTimeout(const char* seconds) {
    ::setenv("LIBDDP_HEARTBEAT_TIMEOUT", seconds, 1);
  }
  ~HeartbeatTimeout() { ::unsetenv("LIBDDP_HEARTBEAT_TIMEOUT"); }
};

}  // namespace libddp::test
