#include "libddp/interop/foreign_state.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/interop/c10d_failure.h"

namespace libddp {

ForeignBackend::State::State(c10::intrusive_ptr<c10d::Backend> backend, GroupIdentity group,
                             c10::intrusive_ptr<c10d::Store> bootstrap)
    : inner(std::move(backend)),
      inner_name(inner->getBackendName()),
      identity(std::move(group)),
      store(std::move(bootstrap)) {}

std::string ForeignBackend::State::where(const std::string& operation) const {
  return identity.where() + " " + operation;
}

void ForeignBackend::State::throw_if_failed() const {
  std::lock_guard lock(mutex);
  if (failure) std::rethrow_exception(failure);
}

ForeignBackend::Flight ForeignBackend::State::issue(const OpDescription& description,
                                                    std::uint64_t number,
                                                    const std::function<Flight()>& call) {
  throw_if_failed();
  try {
    return call();
  } catch (...) {
    const std::exception_ptr error =
        error_of_c10d(std::current_exception(), where(description.to_string(number)), inner_name);
    try {
      std::rethrow_exception(error);
    } catch (const ArgumentError&) {
      throw;  // nothing was sent: the group goes on
    } catch (...) {
      fail(error);
      throw;
    }
  }
}

EventPool::Handle ForeignBackend::State::event_for(c10::DeviceType type) {
  if (!events) events.emplace(type);
  return events->take();
}

c10::Stream ForeignBackend::State::stream_of(c10::Device device) {
  if (!stream || stream->device() != device) {
    stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
  return *stream;
}

void ForeignBackend::State::fail(const std::exception_ptr& error, const WorkPtr& culprit) noexcept {
  std::set<WorkPtr> works;
  {
    std::lock_guard lock(mutex);
    if (failure || (culprit && in_flight.count(culprit) == 0)) return;
    failure = error;
    works.swap(in_flight);
  }
  for (const WorkPtr& work : works) work->finish(error);
}

void ForeignBackend::State::give_up(const WorkPtr& work,
                                    std::chrono::milliseconds timeout) noexcept {
  const std::string message = fmt::format(
      "{}: timed out after {:.1f} s, by libddp's clock: {} has not ended it. Hint: look at what "
      "the other ranks do; if they are only slow, raise the timeout.",
      where(work->description()), std::chrono::duration<double>(timeout).count(), inner_name);
  fail(std::make_exception_ptr(TimeoutError(message)), work);
}

void ForeignBackend::State::add(const WorkPtr& work) {
  std::lock_guard lock(mutex);
  in_flight.insert(work);
}

void ForeignBackend::State::end(const WorkPtr& work, const std::exception_ptr& error,
                                int source_rank, const std::function<void()>& finish) {
  // The group has failed before anybody can learn it from the work.
  if (error) return fail(error);
  {
    std::lock_guard lock(mutex);
    // Not there any more: the group has failed and its tensors are the caller's again.
    if (in_flight.erase(work) == 0) return;
  }
  std::exception_ptr result;
  try {
    if (finish) finish();
  } catch (...) {
    result = std::current_exception();
  }
  work->finish(result, result ? -1 : source_rank);
}

void ForeignBackend::Flight::wait(std::chrono::milliseconds timeout) const {
  for (const WorkHandle& work : works) work->wait(is_message ? timeout : kNoTimeout);
}

int ForeignBackend::Flight::source() const {
  if (source_rank == -1) return works[receive]->sourceRank();
  return source_rank < 0 ? -1 : source_rank;
}

}  // namespace libddp
