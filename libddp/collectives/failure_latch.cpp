#include "libddp/collectives/failure_latch.h"

#include <utility>

#include "libddp/base/error.h"

namespace libddp {

bool FailureLatch::set(CommFailure failure) noexcept {
  std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_.emplace(std::move(failure));
  is_set_.store(true, std::memory_order_release);
  return true;
}

void throw_failure(const CommFailure& failure, const std::string& message) {
  switch (failure.kind) {
    case CommFailure::Kind::Timeout:
      throw TimeoutError(message);
    case CommFailure::Kind::Aborted:
      throw StateError(message);
    case CommFailure::Kind::Network:
      throw NetworkError(message);
    case CommFailure::Kind::Peer:
      break;
  }
  throw PeerError(message, failure.peer_rank, failure.peer_pid);
}

}  // namespace libddp
