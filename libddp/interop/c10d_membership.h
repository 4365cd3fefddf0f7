#pragma once

// Which group stands behind a C10dBackend now: one for good, or, in a group that can be
// reconfigured, none at first and another one after each reconfigure. Thread rule: any thread;
// whoever has got a group keeps it while an operation uses it.
//
//   const Group group = membership.group("all_reduce");     // StateError where there is none
//   membership.replace(store, std::move(group));

#include <memory>
#include <mutex>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/group/process_group.h"
#include "libddp/interop/monitored_barrier.h"

namespace libddp {

class C10dMembership {
 public:
  /// No members yet; `why` is what operations say.
  explicit C10dMembership(std::string why) : why_(std::move(why)) {}
  ~C10dMembership();
  C10dMembership(const C10dMembership&) = delete;
  C10dMembership& operator=(const C10dMembership&) = delete;

  /// Null where there is none.
  Group find() const;
  /// Throws StateError where there is none.
  Group group(const std::string& operation) const;
  std::shared_ptr<MonitoredBarrier> monitored_barrier() const;

  /// REQUIRES: none, as at first or after `take`. `store`: keys of this membership alone.
  void set(c10::intrusive_ptr<c10d::Store> store, Group group);
  /// From now on there is none, as `why` tells; answers what there was.
  Group take(const std::string& why);

 private:
  mutable std::mutex mutex_;
  std::string why_;
  Group group_;
  std::shared_ptr<MonitoredBarrier> monitored_barrier_;
};

}  // namespace libddp
