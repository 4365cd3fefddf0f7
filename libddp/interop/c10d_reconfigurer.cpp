#include "libddp/interop/c10d_reconfigurer.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/host/reconfigure_meeting.h"
#include "libddp/rendezvous/torch_store.h"

namespace libddp {
namespace {

std::string reconfigured_into(const ReconfigurePlan& plan) {
  return fmt::format(
      "the group of this object has other members since {}. Hint: what was made over the former "
      "members (DistributedDataParallel, FSDP, optimizers that share work, sub-groups) is made "
      "again after each reconfigure",
      plan.name());
}

std::string failed_in(const ReconfigurePlan& plan, const std::string& error) {
  return fmt::format(
      "this group has no members since {} failed ({}). Hint: call reconfigure() again in every "
      "process that lives, with a fresh uuid",
      plan.name(), error);
}

}  // namespace

C10dReconfigurer::C10dReconfigurer(ProcessGroup::Options options,
                                   const c10::intrusive_ptr<c10d::Store>& started_over)
    : options_(std::move(options)),
      own_(store_host(started_over), options_.host_identity, options_.timeout) {}

void C10dReconfigurer::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(options_mutex_);
  options_.timeout = timeout;
}

std::chrono::milliseconds C10dReconfigurer::timeout() const {
  const std::lock_guard lock(options_mutex_);
  return options_.timeout;
}

void C10dReconfigurer::connect_from_now_on(c10::Device device) {
  const std::lock_guard lock(options_mutex_);
  device_ = device;
}

void C10dReconfigurer::shut_down() {
  const std::lock_guard turn(turn_mutex_);
  is_shut_down_ = true;
}

void C10dReconfigurer::check(const ReconfigureRequest& request,
                             std::chrono::milliseconds timeout) const {
  const std::string where = fmt::format("libddp reconfigure(uuid={})", request.uuid);
  if (is_shut_down_) {
    throw StateError(fmt::format(
        "{}: the group has been shut down (destroy_process_group). Hint: call init_process_group "
        "again.",
        where));
  }
  if (timeout.count() <= 0) {
    throw ArgumentError(fmt::format("{}: timeout of {} ms. Hint: pass a time greater than zero.",
                                    where, timeout.count()));
  }
  if (used_uuids_.count(request.uuid) > 0) {
    throw ArgumentError(fmt::format(
        "{}: this process has used that uuid before. Hint: draw a fresh one for every reconfigure, "
        "also after one that failed.",
        where));
  }
}

void C10dReconfigurer::reconfigure(const ReconfigureRequest& request,
                                   std::optional<std::chrono::milliseconds> timeout,
                                   C10dMembership& membership) {
  const std::lock_guard turn(turn_mutex_);
  const auto limit = timeout.value_or(this->timeout());
  const Deadline deadline = Deadline::after(limit);
  check(request, limit);
  const ReconfigurePlan plan(request, own_.handle());
  used_uuids_.insert(plan.uuid());
  const std::string reason = reconfigured_into(plan);
  if (const Group former = membership.take(reason)) former->retire(reason);
  try {
    meet(plan, deadline, membership);
  } catch (const Error& error) {
    membership.take(failed_in(plan, error.what()));
    throw;
  } catch (...) {
    membership.take(failed_in(plan, "it was interrupted"));
    throw;
  }
}

void C10dReconfigurer::meet(const ReconfigurePlan& plan, Deadline deadline,
                            C10dMembership& membership) {
  ProcessGroup::Options options;
  std::optional<c10::Device> device;
  {
    const std::lock_guard lock(options_mutex_);
    options = options_;
    device = device_;
  }
  ReconfigureMeeting meeting(plan, options, deadline);
  Group group = meeting.meet();
  if (device) group->connect(*device);
  membership.set(meeting.store(), std::move(group));
  log(LogLevel::Info, "group_reconfigured",
      {{"uuid", plan.uuid()}, {"rank", plan.rank()}, {"world_size", plan.world_size()}});
}

}  // namespace libddp
