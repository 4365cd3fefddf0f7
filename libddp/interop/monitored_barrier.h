#pragma once

// A barrier that names who did not come, and leaves the group usable: torch's monitored_barrier.
//
// It runs over the store, not over the group, because a missing rank must not poison the group.
// Rank 0 waits for every other rank and tells them the outcome. Messages hold the words of torch's
// Gloo backend: "Rank 3 failed to pass monitoredBarrier", "Ranks 1, 3 failed to pass ...",
// "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv
// from rank 0".
// Thread rule: one call at a time per group.
//
//   MonitoredBarrier barrier(store, group);
//   barrier.wait(std::chrono::seconds(10), /*wait_all_ranks=*/true);   // TimeoutError names ranks

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/group/process_group.h"

namespace libddp {

class MonitoredBarrier {
 public:
  MonitoredBarrier(c10::intrusive_ptr<c10d::Store> store, Group group);

  /// TimeoutError: ranks are missing (on rank 0), or rank 0 says so or does not come (elsewhere).
  void wait(std::chrono::milliseconds timeout, bool wait_all_ranks);

 private:
  std::string key(const std::string& what) const;
  /// False where `deadline` passes first. Throws the group's failure.
  bool appears(const std::string& key, Deadline deadline) const;
  void lead(std::chrono::milliseconds timeout, bool wait_all_ranks);
  void follow(std::chrono::milliseconds timeout);
  [[noreturn]] void fail(const std::string& what) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const Group group_;
  std::uint64_t round_ = 0;
};

}  // namespace libddp
