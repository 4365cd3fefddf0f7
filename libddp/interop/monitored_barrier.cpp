#include "libddp/interop/monitored_barrier.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "libddp/base/interrupt.h"

namespace libddp {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{20};
// What rank 0 may need beyond the timeout to write the outcome, on a loaded machine.
constexpr milliseconds kOutcomeGrace{10000};

constexpr const char* kPassed = "passed";
constexpr const char* kFailed = "failed";

}  // namespace

MonitoredBarrier::MonitoredBarrier(c10::intrusive_ptr<c10d::Store> store, Group group)
    : store_(std::move(store)), group_(std::move(group)) {}

void MonitoredBarrier::wait(milliseconds timeout, bool wait_all_ranks) {
  ++round_;
  try {
    if (group_->rank() == 0) {
      lead(timeout, wait_all_ranks);
    } else {
      follow(timeout);
    }
  } catch (const c10::Error& error) {
    throw StoreError(fmt::format("libddp[group {}, rank {}/{}] monitored_barrier: store failed: {}",
                                 group_->name(), group_->rank(), group_->size(),
                                 error.what_without_backtrace()));
  }
}

std::string MonitoredBarrier::key(const std::string& what) const {
  return fmt::format("libddp/{}/monitored_barrier/{}/{}", group_->name(), round_, what);
}

bool MonitoredBarrier::appears(const std::string& key, Deadline deadline) const {
  InterruptPoll interrupt;
  milliseconds pause = kFirstPause;
  while (true) {
    if (store_->check({key})) return true;
    if (deadline.expired()) return false;
    if (const auto failure = group_->failure()) std::rethrow_exception(failure);
    interrupt.poll();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

void MonitoredBarrier::lead(milliseconds timeout, bool wait_all_ranks) {
  store_->set(key("0"), std::string("here"));
  const Deadline deadline = Deadline::after(timeout);
  std::vector<int> missing;
  for (int rank = 1; rank < group_->size(); ++rank) {
    const std::string arrival = key(std::to_string(rank));
    if (appears(arrival, deadline)) {
      store_->deleteKey(arrival);
      continue;
    }
    missing.push_back(rank);
    if (!wait_all_ranks) break;
  }
  store_->set(key("outcome"), std::string(missing.empty() ? kPassed : kFailed));
  if (missing.empty()) return;
  fail(fmt::format(
      "{} {} failed to pass monitoredBarrier in {} ms: Rank 0 timed out in monitoredBarrier",
      wait_all_ranks ? "Ranks" : "Rank", fmt::join(missing, ", "), timeout.count()));
}

void MonitoredBarrier::follow(milliseconds timeout) {
  const std::string complaint = fmt::format(
      "Rank {} successfully reached monitoredBarrier, but received errors while waiting for "
      "send/recv from rank 0. Please check rank 0 logs for faulty rank.",
      group_->rank());
  store_->set(key(std::to_string(group_->rank())), std::string("here"));
  if (!appears(key("0"), Deadline::after(timeout))) {
    fail(fmt::format("{} Rank 0 did not come: timed out in monitoredBarrier after {} ms", complaint,
                     timeout.count()));
  }
  if (!appears(key("outcome"), Deadline::after(timeout + kOutcomeGrace))) {
    fail(fmt::format("{} No outcome: timed out in monitoredBarrier", complaint));
  }
  const bool passed = store_->get_to_str(key("outcome")) == kPassed;
  // The last one to read clears the round.
  if (store_->add(key("readers"), 1) == group_->size() - 1) {
    for (const char* what : {"0", "outcome", "readers"}) store_->deleteKey(key(what));
  }
  if (!passed) fail(complaint);
}

void MonitoredBarrier::fail(const std::string& what) const {
  throw TimeoutError(fmt::format("libddp[group {}, rank {}/{}] monitored_barrier: [Rank {}]: {}",
                                 group_->name(), group_->rank(), group_->size(), group_->rank(),
                                 what));
}

}  // namespace libddp
