#include "libddp/interop/c10d_membership.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/interop/callback_thread.h"

namespace libddp {

C10dMembership::~C10dMembership() {
  if (group_) CallbackThread::release(group_.get());
}

Group C10dMembership::find() const {
  const std::lock_guard lock(mutex_);
  return group_;
}

Group C10dMembership::group(const std::string& operation) const {
  const std::lock_guard lock(mutex_);
  if (group_) return group_;
  throw StateError(fmt::format("libddp {}: {}", operation, why_));
}

std::shared_ptr<MonitoredBarrier> C10dMembership::monitored_barrier() const {
  const std::lock_guard lock(mutex_);
  if (group_) return monitored_barrier_;
  throw StateError(fmt::format("libddp monitored_barrier: {}", why_));
}

void C10dMembership::set(c10::intrusive_ptr<c10d::Store> store, Group group) {
  auto barrier = std::make_shared<MonitoredBarrier>(std::move(store), group);
  const std::lock_guard lock(mutex_);
  group_ = std::move(group);
  monitored_barrier_ = std::move(barrier);
}

Group C10dMembership::take(const std::string& why) {
  const std::lock_guard lock(mutex_);
  why_ = why;
  monitored_barrier_.reset();
  if (group_) CallbackThread::release(group_.get());
  return std::exchange(group_, nullptr);
}

}  // namespace libddp
