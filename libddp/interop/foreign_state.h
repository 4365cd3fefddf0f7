#pragma once

// What a ForeignBackend shares with the threads that wait for the other library's works. For
// foreign_*.cpp only.
// Thread rule: `inner` under `issue_mutex`, the rest by its own lock.
//
//   Flight flight{{inner.allreduce(tensors, options)}};
//   flight.wait(call.timeout);

#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "libddp/interop/foreign_backend.h"

namespace libddp {

struct ForeignBackend::State {
  State(c10::intrusive_ptr<c10d::Backend> inner, GroupIdentity identity);

  /// What a message about one operation begins with.
  std::string where(const std::string& operation) const;
  void throw_if_failed() const;
  /// Keeps the first error, and ends all Works with it.
  void fail(const std::exception_ptr& error) noexcept;
  void add(const WorkPtr& work);
  /// Ends `work`: `finish` and on_success if there is no error.
  void end(const WorkPtr& work, const std::exception_ptr& error, int source_rank,
           const std::function<void()>& finish);

  const c10::intrusive_ptr<c10d::Backend> inner;
  const std::string inner_name;
  const GroupIdentity identity;
  std::mutex issue_mutex;
  std::uint64_t sequence = 0;
  std::uint64_t num_messages = 0;

  mutable std::mutex mutex;
  std::exception_ptr failure;
  std::set<WorkPtr> in_flight;
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
