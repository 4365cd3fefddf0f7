#include "libddp/base/group_failure.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// Null where the failure itself names its culprit, or the network.
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

}  // namespace

GroupFailure told_by(const std::string& teller, int rank, pid_t pid, GroupFailure failure) {
  const char* const verb = own_doing(failure.kind);
  if (verb == nullptr) return failure;
  failure.kind = GroupFailure::Kind::Peer;
  failure.message = fmt::format("{} {}: {}", teller, verb, failure.message);
  if (failure.peer_rank < 0) {
    failure.peer_rank = rank;
    failure.peer_pid = pid;
  }
  return failure;
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
