#pragma once

// What is told when a group fails: where the ranks are that did not come, and one report per group,
// by one rank.
// Thread rule: any thread.
//
//   FailureReporter reporter(identity, peer_names, *comm, flight_recorder, watchdog);
//   throw TimeoutError(text + reporter.where_are({2, 5}));
//   reporter.report(/*waits=*/true);

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libddp/base/group_identity.h"
#include "libddp/collectives/comm.h"
#include "libddp/watchdog/flight_recorder.h"
#include "libddp/watchdog/watchdog.h"

namespace libddp {

class FailureReporter {
 public:
  /// `watchdog`: the group's, null once it has ended. All of these outlive the reporter.
  FailureReporter(const GroupIdentity& identity, const std::vector<std::string>& peer_names,
                  const Comm& comm, const FlightRecorder& flight_recorder,
                  std::function<std::shared_ptr<Watchdog>()> watchdog);

  /// ", which is in load (data.py:31) < ..." for the message of a timeout: asks those ranks.
  std::string where_are(const std::vector<int>& ranks);
  /// The flight log's file and the report, if this rank is the one to write it, each once; nothing
  /// while the group is healthy. `waits`: an operation of this rank raises the failure.
  void report(bool waits) noexcept;

 private:
  bool writes_report(const GroupFailure& failure) const;
  std::string report_text(const GroupFailure& failure);

  const GroupIdentity& identity_;
  const std::vector<std::string>& peer_names_;
  const Comm& comm_;
  const FlightRecorder& flight_recorder_;
  const std::function<std::shared_ptr<Watchdog>()> watchdog_;
  std::atomic<bool> is_reported_{false};
  std::atomic<bool> is_flight_written_{false};
  /// What ranks that did not come have answered, for the report.
  std::mutex stacks_mutex_;
  std::map<int, std::string> stacks_;
};

}  // namespace libddp
