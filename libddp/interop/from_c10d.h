#pragma once

// Any c10d group (Gloo, MPI, UCC, ...) as a libddp group: DistributedDataParallel and all
// operations of ProcessGroup run over it.
//
// The other library moves the bytes, keeps its own deadlines (one that keeps none is given up a
// second later) and finds, or does not find, what the ranks call differently; its errors come as
// libddp's with its text. Averages and factors are right where it has none. Backends that can be
// split (Gloo) give groups that can. Calls that reach it past the wrapper must not be made at the
// same time from another thread. Thread rule: free functions; any thread. No communication.
//
//   libddp::Group group = libddp::from_c10d(gloo);
//   libddp::DistributedDataParallel model(net, group);

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// What a c10d backend does not say about itself.
struct FromC10dOptions {
  /// Name in messages; empty = the backend's own, or "c10d".
  std::string name{};
  /// nullopt = the backend's own, or 30 minutes.
  std::optional<std::chrono::milliseconds> timeout{};
  /// Rank in the first group of each member; empty = what the backend says, or 0 .. size - 1.
  std::vector<int> global_ranks{};
  /// Where parts of the group meet (ProcessGroup::split): one that its ranks share; null = the
  /// group's own if it has one, else the group cannot be split.
  c10::intrusive_ptr<c10d::Store> store{};
};

/// A backend of libddp itself gives the group that it stands for.
/// A group with one backend for CPU tensors and one for an accelerator's gives a group with both.
/// Throws ArgumentError for null, and for a group without a backend.
Group from_c10d(c10::intrusive_ptr<c10d::Backend> backend, FromC10dOptions options = {});
Group from_c10d(const c10::intrusive_ptr<c10d::ProcessGroup>& group, FromC10dOptions options = {});

}  // namespace libddp
