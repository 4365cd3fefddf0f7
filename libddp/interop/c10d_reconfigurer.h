#pragma once

// Changes the members behind a C10dBackend: torch's fault-tolerance API, in a form that does not
// depend on the version of torch.
//
// A reconfigure first ends the membership that there was: what is in flight in it fails at once.
// Then the members meet (reconfigure_meeting.h). Where that fails there are no members, and the
// next reconfigure may succeed. Thread rule: any thread; one reconfigure at a time.
//
//   C10dReconfigurer reconfigurer(options, store);
//   reconfigurer.handle();                                        // for the others
//   reconfigurer.reconfigure({.uuid = 1, .handles = all}, std::nullopt, membership);

#include <chrono>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/group/process_group.h"
#include "libddp/host/member_store.h"
#include "libddp/host/reconfigure_plan.h"
#include "libddp/interop/c10d_membership.h"

namespace libddp {

class C10dReconfigurer {
 public:
  /// What operations say before the first reconfigure.
  static constexpr const char* kNobodyYet =
      "this group has no members yet, as it was made with enable_reconfigure=True. Call "
      "reconfigure() before issuing collectives. Hint: exchange the handles of "
      "torch.distributed._get_reconfigure_handle(), then call torch.distributed._reconfigure() in "
      "every member";

  /// `options`: of all groups that come. `started_over`: only its address is used.
  C10dReconfigurer(ProcessGroup::Options options,
                   const c10::intrusive_ptr<c10d::Store>& started_over);

  const std::string& handle() const { return own_.handle(); }
  const ProcessGroup::Options& options() const { return options_; }
  void set_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds timeout() const;
  /// For the device that the program named at its start: each membership connects it at once.
  void connect_from_now_on(c10::Device device);
  /// Ends the membership for good.
  void shut_down();

  /// `timeout`: of the whole; nullopt = the group's. Errors: ArgumentError before anything has
  /// changed; else as ReconfigureMeeting::meet, and there are no members then.
  void reconfigure(const ReconfigureRequest& request,
                   std::optional<std::chrono::milliseconds> timeout, C10dMembership& membership);

 private:
  void check(const ReconfigureRequest& request, std::chrono::milliseconds timeout) const;
  void meet(const ReconfigurePlan& plan, Deadline deadline, C10dMembership& membership);

  mutable std::mutex options_mutex_;
  ProcessGroup::Options options_;
  std::optional<c10::Device> device_;
  const MemberStore own_;
  std::mutex turn_mutex_;
  std::set<std::int64_t> used_uuids_;
  bool is_shut_down_ = false;
};

}  // namespace libddp
