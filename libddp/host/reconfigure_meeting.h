#pragma once

// One reconfigure among its members: they meet in the lead's store, make sure that all want the
// same, and make a group as at any start (ProcessGroup::create): run key, handshakes, hosts.
//
// NOTE [Meeting]
// 1. Every member says in the lead's store which round it is in (reconfigure_arrival.h), and takes
//    it back at the end, however that is.
// 2. The lead then looks at all others, the others at the lead: of two that differ, one comes
//    second and sees it. What is left by a member that is still leaving the round before goes away
//    within a moment, and is waited for.
// 3. Who sees a difference tells both rounds, as a bootstrap is refused.
// 4. Keys of a round begin with its uuid and the digest of its members, so nothing of another round
//    is ever read.
// Thread rule: one thread; blocking.
//
//   ReconfigureMeeting meeting(plan, options, Deadline::after(timeout));
//   Group group = meeting.meet();
//   c10::intrusive_ptr<c10d::Store> store = meeting.store();   // keys of this membership alone

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/deadline.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/group/process_group.h"
#include "libddp/host/member_watch.h"
#include "libddp/host/reconfigure_arrival.h"
#include "libddp/host/reconfigure_plan.h"

namespace libddp {

class RunKey;

class ReconfigureMeeting {
 public:
  /// `plan` outlives it. `options`: as for a group of any start; rank, world size and the time for
  /// joining come from here.
  ReconfigureMeeting(const ReconfigurePlan& plan, ProcessGroup::Options options, Deadline deadline);

  /// Errors: PeerError (a member has ended, failed, or was given something else), NetworkError (the
  /// lead cannot be reached), TimeoutError that names who never came, StoreError.
  Group meet();
  /// After meet().
  const c10::intrusive_ptr<c10d::Store>& store() const { return round_store_; }

 private:
  void open_store();
  void compare();
  void compare_with(int rank);
  [[noreturn]] void refuse(int rank, const ReconfigureArrival& theirs);
  void tell(const ReconfigureArrival& round, int rank, int world_size, const std::string& reason);
  c10::intrusive_ptr<c10d::Store> store_of(const ReconfigureArrival& round) const;
  Group join();
  void take_back() noexcept;
  std::chrono::milliseconds time_left() const;
  KeyValueStore& arrivals() { return sealed_ ? *sealed_ : *keys_; }

  const ReconfigurePlan& plan_;
  ProcessGroup::Options options_;
  const Deadline deadline_;
  const ReconfigureArrival arrival_;
  const MemberWatch watch_;
  const std::shared_ptr<const RunKey> key_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Store> round_store_;
  std::unique_ptr<KeyValueStore> keys_;
  /// Over keys_, where there is a run key: believes only who has it.
  std::unique_ptr<KeyValueStore> sealed_;
};

}  // namespace libddp
