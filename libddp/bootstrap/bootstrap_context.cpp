#include "libddp/bootstrap/bootstrap_context.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"

namespace libddp {

using Kind = GroupFailure::Kind;

namespace {

// Counts the ranks but 0 that know of the failure.
constexpr const char* kHeardKey = "error_heard";

}  // namespace

std::string BootstrapContext::where() const {
  return fmt::format("libddp[group {}, rank {}/{}] bootstrap", options_.group_name, options_.rank,
                     options_.world_size);
}

void BootstrapContext::open() {
  if (options_.world_size < 1 || options_.rank < 0 || options_.rank >= options_.world_size) {
    throw ArgumentError(
        fmt::format("{}: rank {} is not in [0, {}). Hint: check RANK and WORLD_SIZE.", where(),
                    options_.rank, options_.world_size));
  }
  places_.resize(static_cast<std::size_t>(options_.world_size));
  if (options_.key) session_ = std::make_unique<BootstrapSession>(store_, options_);
}

void BootstrapContext::learn(PeerInfo info) {
  Place& its_place = place(info.rank);
  its_place.info = std::move(info);
  its_place.is_known = true;
  // Until the rank is reached its process is watched; a pid of another machine or namespace means
  // nothing here.
  const PeerInfo& mine = place(options_.rank).info;
  if (its_place.info.rank == options_.rank || mine.pid_namespace.empty() ||
      its_place.info.boot_id != mine.boot_id ||
      its_place.info.pid_namespace != mine.pid_namespace) {
    return;
  }
  its_place.process = ProcessHandle(its_place.info.pid);
  if (its_place.process.has_ended()) fail_gone(its_place.info, "no such process");
}

void BootstrapContext::look_around() {
  check_interrupt();
  if (options_.look) options_.look();
  throw_published();
  for (const Place& other : places_) {
    if (other.process.has_ended()) fail_gone(other.info, "its process ended");
  }
  if (deadline_.expired()) fail_timeout();
}

void BootstrapContext::throw_published() {
  if (const std::optional<GroupFailure> failure = find_failure(failures())) {
    failure_is_published_ = true;
    confirm();
    throw_failure(*failure, where() + ": " + failure->message);
  }
}

void BootstrapContext::confirm() noexcept {
  if (options_.rank == 0) return;
  try {
    store_.add(kHeardKey, 1);
  } catch (const std::exception& error) {
    // What the bootstrap failed of says more than a store that is gone since.
    log(LogLevel::Debug, "bootstrap_failure_not_confirmed", {{"reason", error.what()}});
  }
}

void BootstrapContext::wait_until_heard() {
  constexpr std::chrono::milliseconds kPause{10};
  while (!deadline_.expired() && store_.add(kHeardKey, 0) < options_.world_size - 1) {
    check_interrupt();
    std::this_thread::sleep_for(kPause);
  }
}

void BootstrapContext::fail(const GroupFailure& failure) {
  GroupFailure agreed = failure;
  failure_is_published_ = true;
  try {
    agreed = publish_failure(failures(), failure);
    confirm();
  } catch (const Error& error) {
    // What the bootstrap failed of says more than a store that cannot be told.
    report_not_published(error.what());
  }
  throw_failure(agreed, where() + ": " + agreed.message);
}

void BootstrapContext::fail_timeout() {
  std::vector<std::string> missing;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (rank == options_.rank || is_linked(rank)) continue;
    if (!has_come(rank)) {
      missing.push_back(
          fmt::format("rank {} (never came{})", rank, session_ ? " with this run's key" : ""));
    } else if (place(rank).is_known) {
      missing.push_back(info(rank).who());
    }
  }
  const std::chrono::duration<double> waited = Deadline::Clock::now() - start_;
  fail({Kind::Timeout,
        fmt::format(
            "timed out after {:.1f} s waiting for {}. Hint: look at the output of the missing "
            "ranks; give more time (timeout) if they only start late.",
            waited.count(), fmt::join(missing, ", ")),
        -1, 0});
}

// Descriptions are read in order: one behind the first missing one may be there.
bool BootstrapContext::has_come(int rank) {
  if (place(rank).is_known) return true;
  if (session_) return session_->has_entry(rank);
  return store_.try_get(fmt::format("peer/{}", rank)).has_value();
}

void BootstrapContext::fail_gone(const PeerInfo& gone, const std::string& reason) {
  throw_published();
  // In one network namespace only a process that ended does not answer.
  const Kind kind = gone.network_namespace.empty() ? Kind::Network : Kind::Peer;
  fail({kind,
        fmt::format(
            "{} on {} left before all ranks had met: {}. Hint: look at the output of rank {} "
            "for the first error.",
            gone.who(), gone.host, reason, gone.rank),
        gone.rank, gone.pid});
}

void BootstrapContext::report_not_published(const std::string& reason) const noexcept {
  log(LogLevel::Warn, "bootstrap_failure_not_published",
      {{"group", options_.group_name}, {"reason", reason}});
}

void BootstrapContext::announce(const std::string& reason) noexcept {
  if (failure_is_published_) return;
  try {
    const pid_t pid = ::getpid();
    publish_failure(failures(), {Kind::Peer,
                                 fmt::format("rank {} (pid {}) could not take part: {}",
                                             options_.rank, pid, reason),
                                 options_.rank, pid});
    confirm();
  } catch (const std::exception& error) {
    // The caller throws the first error; the others will time out.
    report_not_published(error.what());
  }
}

}  // namespace libddp
