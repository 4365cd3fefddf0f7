#include "libddp/host/reconfigure_meeting.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/bootstrap/sealed_store.h"
#include "libddp/rendezvous/store_opening.h"
#include "libddp/rendezvous/torch_store.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {
namespace {

using std::chrono::milliseconds;

// So long a member may need to leave the round before, on a loaded machine.
constexpr milliseconds kLongestLeaving{5000};
constexpr milliseconds kLook{50};

std::string prefix_of(const ReconfigurePlan& plan) {
  return fmt::format("libddp/reconfigure/{}/", plan.lead().instance);
}

std::string arrival_key(const MemberHandle& member) { return "arrival/" + member.instance; }

}  // namespace

ReconfigureMeeting::ReconfigureMeeting(const ReconfigurePlan& plan, ProcessGroup::Options options,
                                       Deadline deadline)
    : plan_(plan),
      options_(std::move(options)),
      deadline_(deadline),
      arrival_(ReconfigureArrival::of(plan)),
      watch_(plan),
      key_(given_run_key()) {
  options_.rank = plan.rank();
  options_.world_size = plan.world_size();
  options_.global_ranks.clear();  // the members are the world
}

milliseconds ReconfigureMeeting::time_left() const {
  const auto left = deadline_.remaining(std::chrono::hours(24 * 365));
  return std::max(std::chrono::ceil<milliseconds>(left), milliseconds(1));
}

Group ReconfigureMeeting::meet() {
  open_store();
  arrivals().set(arrival_key(plan_.own()), arrival_.encode());
  try {
    compare();
    Group group = join();
    take_back();
    return group;
  } catch (...) {
    take_back();
    throw;
  }
}

void ReconfigureMeeting::open_store() {
  const MemberHandle& lead = plan_.lead();
  const auto look = [this] { watch_.throw_if_ended(); };
  try {
    // Its store is there since before the handle was: nobody has to be waited for.
    connect_tcp({lead.address, lead.port}, deadline_);
    store_ =
        open_tcp_store(lead.address, lead.port, StoreRole::Client, plan_.rank(), time_left(), look);
  } catch (const PeerError&) {
    throw;
  } catch (const Error& error) {
    watch_.throw_if_ended();
    throw NetworkError(fmt::format(
        "libddp {}: {} on the way to {}:{}, where {} holds the store that all members meet in. "
        "Hint: that process may have ended or be stopped, or a firewall be between; reconfigure "
        "with a fresh uuid and the handles of processes that live.",
        plan_.name(), error.what(), lead.address, lead.port, lead.who()));
  }
  store_->setTimeout(options_.timeout);
  const StoreLimits limits{.deadline = deadline_, .look = look};
  keys_ = std::make_unique<TorchStore>(store_, prefix_of(plan_), limits);
  if (!key_) return;
  sealed_ = std::make_unique<SealedStore>(*keys_, key_, "reconfigure " + plan_.lead().instance);
}

// NOTE [Meeting]
void ReconfigureMeeting::compare() {
  const bool is_lead = plan_.own().instance == plan_.lead().instance;
  for (int rank = 0; rank < plan_.world_size(); ++rank) {
    const MemberHandle& member = plan_.members()[static_cast<std::size_t>(rank)];
    const bool concerns = is_lead || member.instance == plan_.lead().instance;
    if (concerns && rank != plan_.rank()) compare_with(rank);
  }
}

void ReconfigureMeeting::compare_with(int rank) {
  const std::string key = arrival_key(plan_.members()[static_cast<std::size_t>(rank)]);
  const Deadline leaving = Deadline::after(std::min(kLongestLeaving, time_left() / 2));
  while (true) {
    const std::optional<std::string> text = arrivals().try_get(key);
    if (!text) return;  // it comes later, and looks itself
    const ReconfigureArrival theirs = ReconfigureArrival::decode(*text);
    if (theirs.is_same_round(arrival_)) return;
    if (leaving.expired()) refuse(rank, theirs);
    std::this_thread::sleep_for(kLook);
    check_interrupt();
    watch_.throw_if_ended();
  }
}

void ReconfigureMeeting::refuse(int rank, const ReconfigureArrival& theirs) {
  const MemberHandle& member = plan_.members()[static_cast<std::size_t>(rank)];
  const std::string reason = fmt::format(
      "{} and {} were given different reconfigures: {}. Hint: all members must pass the same uuid "
      "and the same handles, in the same order",
      plan_.own().who(), member.who(), arrival_.difference(theirs));
  tell(arrival_, plan_.rank(), plan_.world_size(), reason);
  // There this process is none of the ranks.
  tell(theirs, theirs.world_size, theirs.world_size + 1, reason);
  throw PeerError(fmt::format("libddp {}: {}.", plan_.name(), reason), rank, member.pid);
}

void ReconfigureMeeting::tell(const ReconfigureArrival& round, int rank, int world_size,
                              const std::string& reason) {
  BootstrapOptions told;
  told.rank = rank;
  told.world_size = world_size;
  told.group_name = options_.name;
  told.key = key_;
  // As ProcessGroup::create has it.
  const std::string prefix = fmt::format("libddp/{}/", options_.name);
  TorchStore store(store_of(round), prefix, {.deadline = deadline_});
  refuse_bootstrap(store, told, reason);
}

c10::intrusive_ptr<c10d::Store> ReconfigureMeeting::store_of(
    const ReconfigureArrival& round) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_of(plan_) + round.round(), store_);
}

Group ReconfigureMeeting::join() {
  round_store_ = store_of(arrival_);
  ProcessGroup::Options options = options_;
  options.join_timeout = time_left();
  options.look = [this] { watch_.throw_if_ended(); };
  return ProcessGroup::create(round_store_, std::move(options));
}

void ReconfigureMeeting::take_back() noexcept {
  try {
    arrivals().remove(arrival_key(plan_.own()));
  } catch (const std::exception& error) {
    // What else happened says more; who meets here again waits for this a moment longer.
    log(LogLevel::Debug, "reconfigure_arrival_left", {{"reason", error.what()}});
  }
}

}  // namespace libddp
