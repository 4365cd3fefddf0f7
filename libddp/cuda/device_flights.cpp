#include "libddp/cuda/device_flights.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/stack_dump.h"

namespace libddp {
namespace {

using Clock = std::chrono::steady_clock;

/// NCCL's own errors come late, and asking costs a lock of NCCL's.
constexpr std::chrono::milliseconds kErrorPeriod{500};
/// An operation that takes longer may wait for a rank that calls something else.
constexpr std::chrono::seconds kFirstLook{5};
constexpr std::chrono::seconds kLongestPause{60};
constexpr std::chrono::milliseconds kAnswerTime{800};
constexpr int kMostAsked = 16;
/// A rank may be ahead of another one by what fits into NCCL's buffers.
constexpr std::uint64_t kReach = 16;

}  // namespace

DeviceFlights::DeviceFlights(GroupIdentity identity, const NcclApi& api, Backend& host,
                             std::string device_name)
    : identity_(std::move(identity)),
      api_(api),
      host_(host),
      watchdog_(DeviceWatchdog::get()),
      device_name_(std::move(device_name)),
      running_call_([this] { return describe_running(); }) {}

void DeviceFlights::Lane::begin_first() {
  first_since = Clock::now();
  look_again = kFirstLook;
  next_look = first_since + kFirstLook;
}

std::string DeviceFlights::group_name() const {
  return fmt::format("{} ({})", identity_.name, device_name_);
}

void DeviceFlights::add(const std::shared_ptr<NcclCommunicator>& communicator,
                        const std::shared_ptr<DeviceOperation>& operation,
                        const std::shared_ptr<StreamWork>& work) {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = error_;
    if (!error) {
      Lane& lane = lanes_[communicator.get()];
      if (!lane.communicator) lane.communicator = communicator;
      if (lane.flights.empty()) lane.begin_first();
      lane.flights.push_back({operation, work});
    }
  }
  error ? end_late(*communicator, *operation, *work, error) : watchdog_.wake();
}

// Whoever ended the others did not know this communicator, or not that it had something to do: its
// kernel would wait for ever, and with it whoever waits for the stream.
void DeviceFlights::end_late(NcclCommunicator& communicator, DeviceOperation& operation,
                             StreamWork& work, const std::exception_ptr& error) noexcept {
  record_end(operation, false);
  work.finish(error);
  communicator.abort();
  operation.let_go();
}

FlightRecorder::Ticket DeviceFlights::record(const OpDescription& description,
                                             std::uint64_t sequence) {
  FlightRecorder* const recorder = host_.flight_recorder();
  return recorder != nullptr ? recorder->add_running(description, sequence) : 0;
}

void DeviceFlights::record_end(const DeviceOperation& operation, bool succeeded) {
  FlightRecorder* const recorder = host_.flight_recorder();
  if (recorder == nullptr) return;
  const std::int64_t device_ns = succeeded ? operation.device_time().count() : 0;
  recorder->finish(operation.ticket, succeeded, device_ns);
}

void DeviceFlights::called(const OpDescription& description, std::uint64_t sequence) {
  if (identity_.world_size == 1) return;
  calls_.add(description, sequence);
  watchdog_.wake();
}

void DeviceFlights::hear(int rank, const LastCalls& calls) {
  calls_.hear(rank, calls);
  watchdog_.wake();
}

void DeviceFlights::tell_calls() {
  const int neighbour = (identity_.rank + 1) % identity_.world_size;
  while (const auto news = calls_.news()) host_.tell_calls(neighbour, *news);
}

void DeviceFlights::compare_calls() {
  const auto difference = calls_.compare();
  if (!difference) return;
  if (!difference->own.empty()) {
    return refuse_difference(difference->own, difference->theirs, difference->rank);
  }
  const std::string last = fmt::format("one of its collectives up to #{}", difference->sequence);
  refuse_difference(last, "that", difference->rank);
}

bool DeviceFlights::look() noexcept {
  try {
    if (const std::exception_ptr lost = host_.failure()) end_all(lost);
    look_at_lanes();
    tell_calls();
    compare_calls();
    check_nccl_errors();
  } catch (const Error& error) {
    // Told already, by whoever threw it.
    log(LogLevel::Debug, "device_group_failed", {{"group", group_name()}, {"error", error.what()}});
  } catch (const std::exception&) {
    fail_here({GroupFailure::Kind::Device,
               fmt::format("the device reports an error: {}. Hint: it is that of a kernel that ran "
                           "before; CUDA_LAUNCH_BLOCKING=1 shows which",
                           first_line_of(std::current_exception()))});
  }
  const std::lock_guard lock(mutex_);
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return !lane.second.flights.empty(); });
}

void DeviceFlights::look_at_lanes() {
  std::vector<Flight> done;
  std::vector<std::pair<std::shared_ptr<DeviceOperation>, Lane>> held_up;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [communicator, lane] : lanes_) {
      for (Flight& flight : take_done(lane)) done.push_back(std::move(flight));
      if (lane.flights.empty()) continue;
      const Clock::time_point now = Clock::now();
      const auto& first = lane.flights.front().operation;
      const bool is_late = now - lane.first_since >= first->timeout;
      if (!is_late && now < lane.next_look) continue;
      held_up.emplace_back(
          first, Lane{lane.communicator, {}, lane.first_since, lane.next_look, lane.look_again});
      lane.look_again = std::min(lane.look_again * 2, kLongestPause);
      lane.next_look = now + lane.look_again;
    }
  }
  for (const Flight& flight : done) {
    flight.operation->let_go();
    record_end(*flight.operation, true);
    if (const auto work = flight.work.lock()) work->finish();
  }
  for (const auto& [first, lane] : held_up) check_first(first, lane);
}

std::vector<DeviceFlights::Flight> DeviceFlights::take_done(Lane& lane) {
  // Asking takes as long as issuing, and holds up who issues: the end is sought, not counted.
  const auto end =
      std::partition_point(lane.flights.begin(), lane.flights.end(),
                           [](const Flight& flight) { return flight.operation->is_done(); });
  std::vector<Flight> done(std::move_iterator(lane.flights.begin()), std::move_iterator(end));
  lane.flights.erase(lane.flights.begin(), end);
  if (!done.empty()) lane.begin_first();
  return done;
}

void DeviceFlights::check_first(const std::shared_ptr<DeviceOperation>& first, const Lane& lane) {
  if (Clock::now() - lane.first_since >= first->timeout) return refuse_late(*first);
  if (identity_.world_size > 1) refuse_mismatch(*first);
}

void DeviceFlights::refuse_late(const DeviceOperation& late) {
  fail_here(
      {GroupFailure::Kind::Timeout,
       fmt::format("{} on {}: timed out after {:.1f} s{}. Hint: see what the ranks that have "
                   "not come are doing; raise the timeout if they are only slow",
                   late.text(), device_name_, std::chrono::duration<double>(late.timeout).count(),
                   where_others_are(late))});
}

std::map<int, std::string> DeviceFlights::ask_others() {
  std::vector<int> ranks;
  for (int rank = 0; rank < identity_.world_size && std::ssize(ranks) < kMostAsked; ++rank) {
    if (rank != identity_.rank) ranks.push_back(rank);
  }
  return host_.ask_where(ranks, kAnswerTime);
}

std::string DeviceFlights::where_others_are(const DeviceOperation& operation) {
  std::string text;
  for (const auto& [rank, answer] : ask_others()) {
    const std::string call = call_in(answer, group_name());
    if (call == operation.text()) continue;
    const std::string stack = brief_stack(answer);
    text += call.empty() ? fmt::format("; rank {} has not come to it", rank)
                         : fmt::format("; rank {} is in {}", rank, call);
    if (!stack.empty()) text += fmt::format(", its program is in {}", stack);
  }
  return text;
}

std::map<std::uint64_t, std::string> DeviceFlights::last_calls() const {
  std::uint64_t first = calls_.sequence() + 1;
  for (const auto& [communicator, lane] : lanes_) {
    for (const Flight& flight : lane.flights) {
      if (flight.operation->sequence == 0) continue;
      first = std::min(first, flight.operation->sequence);
      break;
    }
  }
  return calls_.around(first, kReach);
}

// Also calls that have ended: with few elements too many, a rank's kernel takes those of the next
// call for them, and it is the next call, the same on all ranks, that waits.
void DeviceFlights::refuse_mismatch(const DeviceOperation& first) {
  if (first.sequence == 0) return;
  std::map<std::uint64_t, std::string> own;
  {
    const std::lock_guard lock(mutex_);
    own = last_calls();
  }
  std::string waits_for;
  for (const auto& [rank, answer] : ask_others()) {
    if (call_in(answer, group_name()).empty()) {
      waits_for += fmt::format("{}{}", waits_for.empty() ? "" : ", ", rank);
    }
    for (const auto& [number, call] : last_calls_in(answer, group_name())) {
      const auto mine = own.find(number);
      if (mine == own.end() || mine->second == call) continue;
      return refuse_difference(mine->second, call, rank);
    }
  }
  if (waits_for.empty()) return;
  log(LogLevel::Warn, "waits_on_device",
      {{"group", group_name()}, {"call", first.text()}, {"for_ranks", waits_for}});
}

void DeviceFlights::refuse_difference(const std::string& own, const std::string& theirs, int rank) {
  fail_here({GroupFailure::Kind::Peer,
             fmt::format("{} of rank {} does not match {} of rank {}, on {}. Hint: all ranks must "
                         "call the same collectives on device tensors in the same order, with "
                         "tensors of one shape and dtype",
                         own, identity_.rank, theirs, rank, device_name_),
             -1});
}

void DeviceFlights::check_nccl_errors() {
  const Clock::time_point now = Clock::now();
  if (now < next_error_check_) return;
  next_error_check_ = now + kErrorPeriod;
  std::vector<std::pair<std::shared_ptr<NcclCommunicator>, std::string>> asked;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [communicator, lane] : lanes_) {
      if (!lane.flights.empty()) {
        asked.emplace_back(lane.communicator, lane.flights.front().operation->text());
      }
    }
  }
  for (const auto& [communicator, text] : asked) {
    const ncclResult_t result = communicator->async_error();
    if (result == ncclSuccess || result == ncclInProgress) continue;
    return fail_here(
        {GroupFailure::Kind::Device,
         fmt::format("{} on {}: {}. Hint: NCCL_DEBUG=INFO shows what NCCL did", text, device_name_,
                     nccl_error_text(api_, result, communicator->get()))});
  }
}

void DeviceFlights::fail_here(GroupFailure failure) noexcept {
  host_.fail(failure);
  // The first failure counts, which may be another.
  end_all(host_.failure());
}

void DeviceFlights::fail(GroupFailure failure) {
  fail_here(std::move(failure));
  std::rethrow_exception(this->failure());
}

void DeviceFlights::end_all(const std::exception_ptr& error) noexcept {
  std::map<const NcclCommunicator*, Lane> lanes;
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    lanes.swap(lanes_);
  }
  for (auto& [communicator, lane] : lanes) {
    for (const Flight& flight : lane.flights) {
      record_end(*flight.operation, false);
      if (const auto work = flight.work.lock()) work->finish(error);
    }
  }
  // Kernels that were in flight may still write until the abort has ended them.
  for (auto& [communicator, lane] : lanes) {
    lane.communicator->abort();
    for (const Flight& flight : lane.flights) flight.operation->let_go();
  }
}

std::exception_ptr DeviceFlights::failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (error_) return error_;
  }
  return host_.failure();
}

void DeviceFlights::throw_if_failed() {
  const std::exception_ptr error = failure();
  if (!error) return;
  end_all(error);
  std::rethrow_exception(error);
}

bool DeviceFlights::is_idle() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane.second.flights.empty(); });
}

void DeviceFlights::drain() {
  while (!is_idle()) {
    watchdog_.wake();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    check_interrupt();
  }
  // A group of the same name may come after this one, and have these numbers again.
  calls_.end();
}

RunningCallText DeviceFlights::describe_running() const {
  RunningCallText text{group_name(), "", {}};
  const std::lock_guard lock(mutex_);
  for (const auto& [sequence, call] : last_calls()) text.last.push_back(call);
  for (const auto& [communicator, lane] : lanes_) {
    if (lane.flights.empty()) continue;
    text.call = lane.flights.front().operation->text();
    if (lane.flights.front().operation->sequence != 0) break;
  }
  return text;
}

}  // namespace libddp
