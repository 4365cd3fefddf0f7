#include "tests/fakegpu/nccl_faults.h"

#include <algorithm>
#include <utility>

namespace mock_nccl {
namespace {

constexpr int kAllRanks = -2;

/// Whether a wish for the nth of a rank (-1: of all ranks) means this one.
bool is_meant(int nth, int rank, int of_all, int of_rank, int this_rank) {
  return rank < 0 ? nth == of_all : rank == this_rank && nth == of_rank;
}

}  // namespace

Faults& Faults::get() {
  static auto* const faults = new Faults;  // never freed: threads of streams use it
  return *faults;
}

ncclResult_t Faults::enter(const std::string& function, int rank) {
  const std::lock_guard lock(mutex);
  const int of_all = ++wishes.calls[{function, kAllRanks}];
  const int of_rank = ++wishes.calls[{function, rank}];
  for (const Wishes::Failure& failure : wishes.failures) {
    if (failure.function == function && is_meant(failure.nth, failure.rank, of_all, of_rank, rank))
      return failure.result;
  }
  return ncclSuccess;
}

Faults::Operation Faults::begin_operation(int rank) {
  const std::lock_guard lock(mutex);
  const int of_all = ++wishes.operations[kAllRanks];
  const int of_rank = ++wishes.operations[rank];
  const auto is_among = [&](const std::vector<std::pair<int, int>>& all) {
    return std::any_of(all.begin(), all.end(), [&](const std::pair<int, int>& wish) {
      return is_meant(wish.first, wish.second, of_all, of_rank, rank);
    });
  };
  Operation operation{of_all, is_among(wishes.hanging_operations),
                      is_among(wishes.lonely_operations), ncclSuccess, wishes.delay_ms};
  for (const Wishes::Failure& error : wishes.async_errors) {
    if (is_meant(error.nth, error.rank, of_all, of_rank, rank))
      operation.async_error = error.result;
  }
  for (const Wishes::Interlude& wish : wishes.interludes) {
    if (is_meant(wish.nth, wish.rank, of_all, of_rank, rank))
      operation.meanwhile.push_back(wish.function);
  }
  return operation;
}

bool Faults::hangs_init(int rank) {
  const std::lock_guard lock(mutex);
  return std::any_of(wishes.hanging_inits.begin(), wishes.hanging_inits.end(),
                     [&](int wish) { return wish < 0 || wish == rank; });
}

void fail(const std::string& function, int nth_call, ncclResult_t result, int rank) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.failures.push_back({function, nth_call, rank, result});
}

void hang(int nth_operation, int rank) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.hanging_operations.emplace_back(nth_operation, rank);
}

void end_alone(int nth_operation, int rank) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.lonely_operations.emplace_back(nth_operation, rank);
}

void hang_init(int rank) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.hanging_inits.push_back(rank);
}

void fail_async(int nth_operation, ncclResult_t result, int rank) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.async_errors.push_back({"", nth_operation, rank, result});
}

void meanwhile(int nth_operation, int rank, std::function<void()> function) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.interludes.push_back({nth_operation, rank, std::move(function)});
}

void delay(int milliseconds) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes.delay_ms = milliseconds;
}

int calls(const std::string& function, int rank) {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  const auto found = faults.wishes.calls.find({function, rank < 0 ? kAllRanks : rank});
  return found == faults.wishes.calls.end() ? 0 : found->second;
}

std::vector<Issued> issued() {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  return faults.wishes.issued;
}

Live live() {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  return faults.live;
}

void reset() {
  Faults& faults = Faults::get();
  const std::lock_guard lock(faults.mutex);
  faults.wishes = {};
}

}  // namespace mock_nccl
