#include "libddp/base/group_failure.h"

#include "libddp/base/error.h"

namespace libddp {

const char* own_doing(GroupFailure::Kind kind) {
  switch (kind) {
    case GroupFailure::Kind::Aborted:
      return "aborted";
    case GroupFailure::Kind::Timeout:
      return "gave up";
    case GroupFailure::Kind::Device:
      return "failed";
    case GroupFailure::Kind::Peer:
    case GroupFailure::Kind::Network:
      break;
  }
  return nullptr;
}

void throw_failure(const GroupFailure& failure, const std::string& message) {
  switch (failure.kind) {
    case GroupFailure::Kind::Timeout:
      throw TimeoutError(message);
    case GroupFailure::Kind::Aborted:
      throw StateError(message);
    case GroupFailure::Kind::Network:
      throw NetworkError(message);
    case GroupFailure::Kind::Device:
      throw DeviceError(message);
    case GroupFailure::Kind::Peer:
      break;
  }
  throw PeerError(message, failure.peer_rank, failure.peer_pid);
}

}  // namespace libddp
