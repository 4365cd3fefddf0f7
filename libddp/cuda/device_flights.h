#pragma once

// What one group has in flight on its device, and what becomes of it: done, late, broken, or ended
// because a rank was lost.
//
// NOTE [Failure of device operations]
// A group fails once, on the host and on its device. What the peers' watchdog finds out (a rank
// that died or is frozen), what another rank announces, an abort: the backend of the host has it
// first, and here it is looked at every 10 ms. What is found here (a timeout, an error of NCCL or
// of the device, two ranks that call different things) is told to the host's backend, which tells
// the others. Then all operations in flight get the error, and after that the communicators are
// aborted, which ends their kernels: whoever waits for a stream sees the error, not the data. What
// is issued meanwhile, by a call that had begun before, ends in the same way when it is added.
//
// Ranks also tell each other what they have called (call_chain.h), as often as they look: who has
// called something else is told so, also where both calls have ended.
//
// Operations of one communicator end in the order in which they were issued.
// Thread rule: any thread; `look` as DeviceWatchdog says.
//
//   flights->add(communicator, operation, work);
//   flights->throw_if_failed();

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "libddp/base/group_failure.h"
#include "libddp/base/group_identity.h"
#include "libddp/cuda/device_watchdog.h"
#include "libddp/cuda/nccl_api.h"
#include "libddp/cuda/nccl_communicator.h"
#include "libddp/group/backend.h"
#include "libddp/group/device_operation.h"
#include "libddp/group/stream_work.h"
#include "libddp/watchdog/call_chain.h"
#include "libddp/watchdog/flight_recorder.h"
#include "libddp/watchdog/running_calls.h"

namespace libddp {

class DeviceFlights final : public DeviceWatchdog::Watched {
 public:
  /// `host` outlives this. `device_name` for messages: "cuda".
  DeviceFlights(GroupIdentity identity, const NcclApi& api, Backend& host, std::string device_name);

  void add(const std::shared_ptr<NcclCommunicator>& communicator,
           const std::shared_ptr<DeviceOperation>& operation,
           const std::shared_ptr<StreamWork>& work);
  bool look() noexcept override;
  /// A collective has been issued.
  void called(const OpDescription& description, std::uint64_t sequence);
  /// What a peer has called.
  void hear(int rank, const LastCalls& calls);

  /// Throws what the group has failed of.
  void throw_if_failed();
  /// Null while it is healthy.
  std::exception_ptr failure() const;
  /// The group has failed here: tells the others, ends what is in flight. Throws the failure as
  /// this rank's own.
  [[noreturn]] void fail(GroupFailure failure);
  /// Only here, without a word to the others: they know, or the group ends.
  void end_all(const std::exception_ptr& error) noexcept;
  /// Waits until nothing is in flight, or the group has failed.
  void drain();
  bool is_idle() const;

  /// In the flight recorder of the group, which has those of the host too.
  FlightRecorder::Ticket record(const OpDescription& description, std::uint64_t sequence);

 private:
  struct Flight {
    std::shared_ptr<DeviceOperation> operation;
    std::weak_ptr<StreamWork> work;
  };
  /// The operations of one communicator.
  struct Lane {
    std::shared_ptr<NcclCommunicator> communicator;
    std::deque<Flight> flights;
    /// Since when the first one is it.
    std::chrono::steady_clock::time_point first_since;
    /// When to look next at what holds it up.
    std::chrono::steady_clock::time_point next_look;
    std::chrono::seconds look_again{0};

    /// Another operation is the first one from now on.
    void begin_first();
  };

  /// What was issued while the group failed.
  void end_late(NcclCommunicator& communicator, DeviceOperation& operation, StreamWork& work,
                const std::exception_ptr& error) noexcept;
  void look_at_lanes();
  std::vector<Flight> take_done(Lane& lane);
  void check_first(const std::shared_ptr<DeviceOperation>& first, const Lane& lane);
  /// The collectives around the first that is in flight, by number. REQUIRES: the lock.
  std::map<std::uint64_t, std::string> last_calls() const;
  void refuse_late(const DeviceOperation& late);
  void refuse_mismatch(const DeviceOperation& first);
  /// Tells the next rank.
  void tell_calls();
  void compare_calls();
  void refuse_difference(const std::string& own, const std::string& theirs, int rank);
  void check_nccl_errors();
  void fail_here(GroupFailure failure) noexcept;
  void record_end(const DeviceOperation& operation, bool succeeded);
  std::map<int, std::string> ask_others();
  std::string where_others_are(const DeviceOperation& operation);
  RunningCallText describe_running() const;
  std::string group_name() const;

  const GroupIdentity identity_;
  const NcclApi& api_;
  Backend& host_;
  DeviceWatchdog& watchdog_;
  const std::string device_name_;
  mutable std::mutex mutex_;
  std::map<const NcclCommunicator*, Lane> lanes_;
  std::exception_ptr error_;
  CallChain calls_;
  std::chrono::steady_clock::time_point next_error_check_{};
  const RunningCall running_call_;
};

}  // namespace libddp
