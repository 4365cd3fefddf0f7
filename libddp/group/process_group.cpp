#include "libddp/group/process_group.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "libddp/base/log.h"
#include "libddp/group/backend_registry.h"
#include "libddp/group/group_deleter.h"
#include "libddp/group/group_state.h"
#include "libddp/watchdog/flight_log_json.h"

namespace libddp {
namespace {

std::atomic<GroupDeleter> installed_deleter{nullptr};

void delete_group(ProcessGroup* group) noexcept {
  const GroupDeleter deleter = installed_deleter.load();
  if (deleter == nullptr) {
    delete group;
  } else {
    deleter(group);
  }
}

void check_options(const CallSite& site, const ProcessGroup::Options& options) {
  if (options.world_size < 1) {
    site.refuse(fmt::format("world_size={} is not positive", options.world_size),
                "pass the number of ranks, 1 or more");
  }
  check_rank(site, "rank", options.rank);
  if (options.name.empty()) site.refuse("name is empty", "give the group a name");
  if (options.timeout.count() <= 0) {
    site.refuse(fmt::format("timeout of {} ms", options.timeout.count()),
                "pass a time greater than zero");
  }
  const std::set<int> distinct(options.global_ranks.begin(), options.global_ranks.end());
  const auto world_size = static_cast<std::size_t>(options.world_size);
  if (!options.global_ranks.empty() &&
      (options.global_ranks.size() != world_size || distinct.size() != world_size)) {
    site.refuse(fmt::format("global_ranks [{}] are not {} different ranks",
                            fmt::join(options.global_ranks, ", "), world_size),
                "pass one global rank per member, or none");
  }
}

void check_sizes(const CallSite& site, at::IntArrayRef sizes) {
  const bool is_valid =
      std::all_of(sizes.begin(), sizes.end(), [](auto size) { return size >= 0; });
  if (is_valid) return;
  site.refuse(fmt::format("size [{}] has a negative number", fmt::join(sizes, ", ")),
              "sizes are 0 and up");
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

ProcessGroup::ProcessGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}

Group ProcessGroup::create(c10::intrusive_ptr<c10d::Store> store, Options options) {
  auto state = std::make_unique<State>();
  state->identity = {options.name, options.rank, options.world_size};
  const CallSite site{state->identity, "create"};
  check_options(site, options);
  if (!store) site.refuse("store is null", "pass a c10d::Store that all ranks share");
  state->timeout = options.timeout;
  state->store = std::move(store);
  // Groups of one name but other members (sub-groups side by side) do not meet each other. Ranks of
  // the first group always meet, so that world sizes which differ are told instead of timing out.
  std::string prefix = fmt::format("libddp/{}/", options.name);
  if (options.global_ranks.empty()) {
    options.global_ranks = all_ranks(options.world_size);
  } else {
    const std::string listed = fmt::format("{}", fmt::join(options.global_ranks, ","));
    prefix += fmt::format("{:x}/", std::hash<std::string>{}(listed));
  }
  state->backend = create_backend("cpu", {state->store, std::move(prefix), options});
  state->global_ranks = std::move(options.global_ranks);
  state->host_identity = std::move(options.host_identity);
  state->inter = std::move(options.inter);
  state->links = options.links;
  log(LogLevel::Info, "group_created",
      {{"group", options.name},
       {"rank", options.rank},
       {"world_size", options.world_size},
       {"backend", state->backend->name()}});
  return Group(new ProcessGroup(std::move(state)), &delete_group);
}

Group ProcessGroup::over(std::unique_ptr<Backend> backend, Options options) {
  auto state = std::make_unique<State>();
  state->identity = {options.name, options.rank, options.world_size};
  check_options({state->identity, "over"}, options);
  state->timeout = options.timeout;
  state->global_ranks = std::move(options.global_ranks);
  if (state->global_ranks.empty()) state->global_ranks = all_ranks(options.world_size);
  state->backend = std::move(backend);
  return Group(new ProcessGroup(std::move(state)), &delete_group);
}

GroupDeleter set_group_deleter(GroupDeleter deleter) { return installed_deleter.exchange(deleter); }

ProcessGroup::~ProcessGroup() {
  if (state_->made.is_current()) return;
  // A forked child has copies of handles whose threads, locks and sockets belong to its parent.
  // Destroying them would disturb the parent; the child's end frees them.
  static_cast<void>(state_->store.release());
  static_cast<void>(state_->backend.release());
  static_cast<void>(state_.release());
}

int ProcessGroup::rank() const { return state_->identity.rank; }

int ProcessGroup::size() const { return state_->identity.world_size; }

const std::string& ProcessGroup::name() const { return state_->identity.name; }

const std::vector<int>& ProcessGroup::global_ranks() const { return state_->global_ranks; }

std::string ProcessGroup::backend_name() const { return state_->backend->name(); }

std::chrono::milliseconds ProcessGroup::timeout() const { return state_->timeout; }

void ProcessGroup::set_timeout(std::chrono::milliseconds timeout) {
  const CallSite site = state_->enter("set_timeout");
  state_->timeout = check_timeout(site, timeout, timeout);
}

std::uint64_t ProcessGroup::sequence_number() const { return state_->backend->sequence_number(); }

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  check_sizes(state_->enter("allocate"), sizes);
  return state_->backend->allocate(sizes, dtype);
}

at::Tensor ProcessGroup::allocate_shared(at::IntArrayRef sizes, at::ScalarType dtype,
                                         CallOptions options) {
  const CallSite site = state_->enter("allocate_shared");
  check_sizes(site, sizes);
  if (state_->is_alone()) return state_->backend->allocate(sizes, dtype);
  const auto numel = static_cast<std::int64_t>(c10::multiply_integers(sizes));
  BackendCall call = state_->call(site, OpKind::Broadcast, wire_dtype(dtype).value_or(Dtype::UInt8),
                                  numel, options);
  return state_->backend->allocate_shared(std::move(call), sizes, dtype);
}

bool ProcessGroup::is_in_arena(const at::Tensor& tensor) const {
  return state_->backend->is_in_arena(tensor);
}

Group ProcessGroup::split(const std::vector<int>& ranks, const std::string& name) {
  const CallSite site = state_->enter("split");
  if (ranks.empty()) site.refuse("ranks is empty", "pass the ranks of the new group");
  for (const int rank : ranks) check_rank(site, "ranks", rank);
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
    site.refuse(fmt::format("ranks [{}] holds a rank twice", fmt::join(ranks, ", ")),
                "pass each rank once");
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return nullptr;
  Options options;
  options.rank = static_cast<int>(own - ranks.begin());
  options.world_size = static_cast<int>(ranks.size());
  options.name = name;
  options.timeout = timeout();
  options.host_identity = state_->host_identity;
  options.inter = state_->inter;
  options.links = state_->links;
  for (const int rank : ranks) {
    options.global_ranks.push_back(state_->global_ranks[static_cast<std::size_t>(rank)]);
  }
  if (state_->store) return create(state_->store, std::move(options));
  std::unique_ptr<Backend> part =
      state_->backend->split(ranks, {options.name, options.rank, options.world_size});
  if (!part) {
    throw StateError(fmt::format(
        "{} split: a group over {} has no store, or no way, to make a part of it. Hint: make the "
        "smaller group with torch.distributed.new_group and wrap that (from_c10d).",
        state_->identity.where(), backend_name()));
  }
  return over(std::move(part), std::move(options));
}

void ProcessGroup::abort(const std::string& reason) {
  // Also while a shutdown waits for what is in flight: an abort is what ends that.
  if (!state_->made.is_current() || state_->is_closed) state_->refuse_entry("abort");
  state_->backend->abort(reason);
}

void ProcessGroup::report_error(const std::string& what) noexcept {
  if (state_->made.is_current() && !state_->is_shut_down) state_->backend->report_error(what);
}

void ProcessGroup::retract_error() noexcept {
  if (state_->made.is_current()) state_->backend->retract_error();
}

void ProcessGroup::waits(std::vector<std::int64_t>& by_rank) const {
  by_rank.assign(static_cast<std::size_t>(size()), 0);
  state_->backend->add_waits(by_rank);
}

std::string ProcessGroup::flight_log() const {
  std::string reason;
  try {
    if (const auto error = failure()) std::rethrow_exception(error);
  } catch (const Error& error) {
    reason = error.what();
  }
  const FlightRecorder* const recorder = state_->backend->flight_recorder();
  return recorder ? flight_log_json(*recorder, state_->identity, reason) : "{}";
}

std::exception_ptr ProcessGroup::failure() const { return state_->backend->failure(); }

void ProcessGroup::shutdown() {
  if (!state_->made.is_current()) state_->refuse_entry("shutdown");
  std::lock_guard lock(state_->life_mutex);
  if (state_->is_shut_down.exchange(true)) return;
  // Closed in any case: where an interrupt ends the wait, the group has failed and said so.
  struct Close {
    State& state;
    ~Close() {
      state.is_closed = true;
      // A FileStore removes its file when the last rank lets go.
      state.store.reset();
    }
  } close{*state_};
  state_->backend->shutdown();
}

}  // namespace libddp
