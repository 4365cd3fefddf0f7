#pragma once

// What a ForeignBackend shares with the threads that wait for the other library's works. For
// foreign_*.cpp only.
// Thread rule: `inner` under `issue_mutex`, the rest by its own lock.
//
//   Flight flight{{inner.allreduce(tensors, options)}};
//   flight.wait(call.timeout);

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libddp/group/event_pool.h"
#include "libddp/interop/foreign_backend.h"
#include "libddp/interop/foreign_clock.h"

namespace libddp {

struct ForeignBackend::State {
  State(c10::intrusive_ptr<c10d::Backend> inner, GroupIdentity identity,
        c10::intrusive_ptr<c10d::Store> store);

  /// What a message about one operation begins with.
  std::string where(const std::string& operation) const;
  void throw_if_failed() const;
  /// Passes a call on to the other library; what it throws is the group's failure, unless nothing
  /// was sent.
  Flight issue(const OpDescription& description, std::uint64_t number,
               const std::function<Flight()>& call);
  /// Of operations on a device: an event, and the stream in which they finish.
  EventPool::Handle event_for(c10::DeviceType type);
  c10::Stream stream_of(c10::Device device);
  /// Keeps the first error, and ends all Works with it; nothing if `culprit` has ended meanwhile.
  void fail(const std::exception_ptr& error, const WorkPtr& culprit = nullptr) noexcept;
  /// `work` has not ended in time.
  void give_up(const WorkPtr& work, std::chrono::milliseconds timeout) noexcept;
  void add(const WorkPtr& work);
  /// Ends `work`: `finish` and on_success if there is no error.
  void end(const WorkPtr& work, const std::exception_ptr& error, int source_rank,
           const std::function<void()>& finish);

  const c10::intrusive_ptr<c10d::Backend> inner;
  const std::string inner_name;
  const GroupIdentity identity;
  const c10::intrusive_ptr<c10d::Store> store;
  std::mutex issue_mutex;
  std::uint64_t sequence = 0;
  std::uint64_t num_messages = 0;

  mutable std::mutex mutex;
  std::exception_ptr failure;
  std::set<WorkPtr> in_flight;
  /// How often parts of these ranks and this name have been made.
  std::map<std::string, int> num_parts;
  ForeignClock clock;

  // Under `issue_mutex`; made by the first operation on a device.
  std::optional<EventPool> events;
  std::optional<c10::Stream> stream;
};

/// The works that one operation has become.
struct ForeignBackend::Flight {
  std::vector<WorkHandle> works;
  /// Rank that the first receive is from; -1 = the work says it, -2 = there is none.
  int source_rank = -2;
  /// Index of that receive.
  std::size_t receive = 0;
  /// Its deadline is given to the wait, because the call had no place for it.
  bool is_message = false;

  void wait(std::chrono::milliseconds timeout) const;
  int source() const;
};

}  // namespace libddp
