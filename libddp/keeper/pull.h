#pragma once

// What a keeper fetches a save of another host's for, and how far that is. Thread rule: values.

namespace libddp {

enum class PullPurpose {
  /// To be a memory of this host's own.
  Own,
  /// To be a copy.
  Replica,
  /// A copy, when those that are asked for are here. Its time comes when it is asked for as
  /// Replica,
  /// or no newer one is asked for in a while (ReplicaPuller::Options).
  NextReplica,
};

enum class Pulled {
  /// It is not here, and nobody fetches it.
  Failed,
  Coming,
  Here,
};

}  // namespace libddp
