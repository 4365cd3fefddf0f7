#pragma once

// Every exception that libddp throws. Thread rule: values, freely copied.
//
// A message says what, where, why, and what to do, in one line:
//
//   libddp[group world, rank 3/8] all_reduce #42 float32 [25, 1024]: timed out after 30.0 s
//   waiting for rank 5 (pid 4711). Hint: ...
//
// The class says who can do something about it; bindings map each to torch's DistError family.

#include <sys/types.h>

#include <stdexcept>
#include <string>

namespace libddp {

/// Root of libddp's exceptions.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's mistake, found before any byte moves: shape, dtype, device, rank, root.
class ArgumentError : public Error {
 public:
  using Error::Error;
};

/// Called at the wrong time: not initialised, group aborted, backward twice.
class StateError : public Error {
 public:
  using Error::Error;
};

/// The rendezvous store is lost, or a key was never set.
class StoreError : public Error {
 public:
  using Error::Error;
};

/// A connection could not be made, or was lost.
class NetworkError : public Error {
 public:
  using Error::Error;
};

/// A deadline passed.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

/// Another rank died, failed, or called something else. The culprit's rank stays readable by code.
class PeerError : public Error {
 public:
  PeerError(const std::string& message, int peer_rank, pid_t peer_pid = 0)
      : Error(message), peer_rank_(peer_rank), peer_pid_(peer_pid) {}

  /// Rank of the culprit in the group; -1 where several ranks disagree.
  int peer_rank() const { return peer_rank_; }
  /// Process id of the culprit; 0 where it is not known.
  pid_t peer_pid() const { return peer_pid_; }

 private:
  int peer_rank_;
  pid_t peer_pid_;
};

/// CUDA or NCCL failed; their text is kept.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A snapshot file is missing, truncated or damaged.
class SnapshotError : public Error {
 public:
  using Error::Error;
};

}  // namespace libddp
