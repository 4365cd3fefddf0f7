#include "libddp/collectives/failure_latch.h"

#include <utility>

#include "libddp/base/error.h"

namespace libddp {

bool FailureLatch::set(MeshFailure failure) noexcept {
  std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_.emplace(std::move(failure));
  is_set_.store(true, std::memory_order_release);
  return true;
}

void throw_failure(const MeshFailure& failure, const std::string& message) {
  switch (failure.kind) {
    case MeshFailure::Kind::Timeout:
      throw TimeoutError(message);
    case MeshFailure::Kind::Aborted:
      throw StateError(message);
    case MeshFailure::Kind::Network:
      throw NetworkError(message);
    case MeshFailure::Kind::Peer:
      break;
  }
  throw PeerError(message, failure.peer_rank, failure.peer_pid);
}

}  // namespace libddp
