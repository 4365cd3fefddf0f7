#include "libddp/bootstrap/bootstrap.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <utility>

#include "libddp/base/backoff.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/bootstrap/bootstrap_context.h"
#include "libddp/bootstrap/link_bootstrap.h"
#include "libddp/bootstrap/local_request.h"
#include "libddp/bootstrap/peer_info.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/bootstrap/unix_acceptor.h"
#include "libddp/transport/frame.h"
#include "libddp/transport/host_layout.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {
namespace {

using Kind = GroupFailure::Kind;

// For the first claimant's description, to name its pid.
constexpr std::chrono::seconds kClaimantPatience{10};
// With a key a counter that was not 0 may also be the work of a stranger.
constexpr std::chrono::seconds kSealedClaimantPatience{2};
// So long ranks that were started together are waited for before any is looked at by itself.
constexpr std::chrono::milliseconds kStartTogether{100};

std::string info_key(int rank) { return fmt::format("peer/{}", rank); }

// NOTE [Bootstrap]
// 1. Every rank listens, claims its number and publishes its description.
// 2. It reads all descriptions and compares.
// 3. It connects to all lower ranks, sends its request and passes its descriptors. A listening
//    socket queues connections, so nobody waits for anybody here.
// 4. It accepts all higher ranks and answers each with its own descriptors.
// 5. It reads the answers of the lower ranks.
// Step 4 of a rank needs only step 3 of others, step 5 only step 4 of lower ones: no cycle.
// This is between the ranks of a host. With several hosts, link_bootstrap.h then does the same
// between ranks of different hosts.
class Bootstrap {
 public:
  Bootstrap(KeyValueStore& store, const BootstrapOptions& options,
            const std::vector<int>& descriptors, Deadline deadline)
      : context_(store, options, deadline), rank_(options.rank), descriptors_(descriptors) {}

  std::vector<GroupPeer> run();

 private:
  void hold();
  void claim_rank();
  void open_session(BootstrapSession& session);
  void publish_info();
  void collect_infos();
  void check_has_no_key(int rank);
  void do_without_key();
  bool take_infos(const std::vector<int>& ranks);
  void take_info(int rank, const std::string& text);
  void find_hosts();
  bool is_local(int rank) const { return layout_.is_local(rank, rank_); }
  bool expects_local_ranks() const;
  void connect_to(int lower_rank);
  void take_request(AdmittedPeer& admitted);
  void read_answer(int lower_rank);
  template <typename Call>
  auto talk_to(int other_rank, Call call);
  GroupPeer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  BootstrapContext context_;
  const int rank_;
  const std::vector<int>& descriptors_;
  UnixAcceptor acceptor_;
  HostLayout layout_;
  std::vector<GroupPeer> peers_;
};

std::vector<GroupPeer> Bootstrap::run() {
  // Whatever goes wrong is told to the others before the listener closes.
  try {
    hold();
  } catch (const std::exception& error) {
    context_.announce(error.what());
    throw;
  } catch (...) {
    context_.announce("it was interrupted");
    throw;
  }
  return std::move(peers_);
}

void Bootstrap::hold() {
  const int world_size = context_.options().world_size;
  context_.open();
  peers_.resize(static_cast<std::size_t>(world_size));
  claim_rank();
  if (BootstrapSession* session = context_.session()) open_session(*session);
  publish_info();
  collect_infos();
  find_hosts();
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_local(rank)) connect_to(rank);
  }
  Deadline next_look = Deadline::after(kInterruptPeriod);
  while (expects_local_ranks()) {
    for (AdmittedPeer& admitted : acceptor_.admit(kInterruptPeriod)) take_request(admitted);
    if (!next_look.expired()) continue;
    context_.look_around();
    next_look = Deadline::after(kInterruptPeriod);
  }
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_local(rank)) read_answer(rank);
  }
  for (GroupPeer& each : peers_) {
    if (each.control) each.process = ProcessHandle::of_peer(each.control.get());
  }
  if (layout_.num_hosts() > 1 && !context_.options().key) do_without_key();
  if (layout_.num_hosts() > 1) LinkBootstrap(context_, layout_, peers_).run();
}

void Bootstrap::find_hosts() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    keys.push_back(context_.info(rank).host_key());
  }
  layout_ = HostLayout::from_keys(keys);
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    const PeerInfo& info = context_.info(rank);
    peer(rank).rank = rank;
    peer(rank).pid = info.pid;
    peer(rank).host = info.host;
    peer(rank).note = info.note;
    peer(rank).host_index = layout_.host(rank);
  }
}

void Bootstrap::do_without_key() {
  constexpr const char* kHint =
      "Hint: give every host the same secret file of 32 bytes or more (LIBDDP_RUN_KEY_FILE, or "
      "'libddp run --run-key-file'; docs/security.md).";
  if (context_.options().require_key) {
    throw ArgumentError(fmt::format(
        "{}: the ranks are on {} hosts and there is no run key, which require_key demands. {}",
        context_.where(), layout_.num_hosts(), kHint));
  }
  // Once per run: the first group has rank 0 of the run at its rank 0.
  static std::atomic<bool> is_first_group{true};
  if (!is_first_group.exchange(false) || rank_ != 0) return;
  log(LogLevel::Warn, "no_run_key",
      {{"group", context_.options().group_name},
       {"num_hosts", layout_.num_hosts()},
       {"reason", "whoever can reach the store can join this run or disturb its start"},
       {"hint", kHint}});
}

bool Bootstrap::expects_local_ranks() const {
  const std::vector<int>& local = layout_.ranks_of(layout_.host(rank_));
  return std::any_of(local.begin(), local.end(),
                     [this](int rank) { return rank > rank_ && !context_.is_linked(rank); });
}

void Bootstrap::publish_info() {
  PeerInfo mine;
  mine.rank = rank_;
  mine.world_size = context_.options().world_size;
  mine.pid = ::getpid();
  mine.host = host_name();
  mine.boot_id = machine_id();
  mine.network_namespace = network_namespace();
  if (!context_.options().host_identity.empty()) {
    mine.network_namespace = context_.options().host_identity;
  }
  mine.pid_namespace = pid_namespace();
  mine.socket_name = acceptor_.name();
  mine.token = random_hex(16);
  mine.agreement = context_.options().agreement;
  mine.note = context_.options().note;

  context_.entries().set(info_key(rank_), mine.encode());
  context_.learn(std::move(mine));
}

void Bootstrap::claim_rank() {
  if (context_.store().add(fmt::format("claim/{}", rank_), 1) == 1) return;
  pid_t other = 0;
  if (BootstrapSession* session = context_.session()) {
    const auto join_entry = session->find_other_claimant(Deadline::after(kSealedClaimantPatience));
    if (!join_entry) return;  // a stranger has counted
    other = join_entry->pid;
  } else {
    const auto info =
        context_.store().wait_get(info_key(rank_), Deadline::after(kClaimantPatience));
    if (info) other = PeerInfo::decode(*info).pid;
  }
  context_.fail(
      {Kind::Peer,
       fmt::format("two processes call themselves rank {}: pid {} and pid {}. Hint: give every "
                   "process its own RANK, and every run a fresh store.",
                   rank_, other == 0 ? "unknown" : std::to_string(other), ::getpid()),
       rank_, other});
}

// NOTE [Session], in bootstrap_session.h.
void Bootstrap::open_session(BootstrapSession& session) {
  session.publish();
  const Deadline together = Deadline::after(kStartTogether);
  Backoff backoff(kStartTogether);
  while (!session.try_all_entries() && !together.expired()) {
    context_.look_around();
    backoff.pause(together);
  }
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    const JoinEntry* join_entry = session.try_entry(rank);
    while (join_entry == nullptr) {
      context_.look_around();
      join_entry = session.try_entry(rank);
    }
    // The descriptions come too late for this: ranks that expect others than these do not get
    // there.
    const auto in_short = [](const JoinEntry& of) {
      PeerInfo info;
      info.rank = of.rank;
      info.world_size = of.world_size;
      info.pid = of.pid;
      return info;
    };
    const auto failure = find_disagreement(in_short(session.own()), in_short(*join_entry));
    if (failure) context_.fail(*failure);
  }
  session.open();
}

// Ranks that start together are read in one request. Once somebody is late the others are looked at
// one by one: a disagreement shows without waiting for the last.
void Bootstrap::collect_infos() {
  std::vector<int> missing;
  for (int rank = 0; rank < context_.options().world_size; ++rank) {
    if (rank != rank_) missing.push_back(rank);
  }
  const Deadline together = Deadline::after(kStartTogether);
  Backoff backoff(kStartTogether);
  while (!take_infos(missing)) {
    context_.look_around();
    if (!together.expired()) {
      backoff.pause(together);
      continue;
    }
    const int rank = missing.front();
    if (!context_.session()) check_has_no_key(rank);
    const auto text =
        context_.entries().wait_get(info_key(rank), Deadline::after(kInterruptPeriod));
    if (!text) continue;
    take_info(rank, *text);
    missing.erase(missing.begin());
  }
}

bool Bootstrap::take_infos(const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(info_key(rank));
  const auto texts = context_.entries().try_get_all(keys);
  if (!texts) return false;
  for (std::size_t i = 0; i < ranks.size(); ++i) take_info(ranks[i], (*texts)[i]);
  return true;
}

void Bootstrap::take_info(int rank, const std::string& text) {
  PeerInfo info = PeerInfo::decode(text);
  if (info.rank != rank) {
    throw StoreError(fmt::format("{}: the store's description of rank {} is that of {}.",
                                 context_.where(), rank, info.who()));
  }
  if (const auto failure = find_disagreement(context_.info(rank_), info)) context_.fail(*failure);
  context_.learn(std::move(info));
}

// A rank with a key does not believe this one, and this one would wait for its description in vain.
void Bootstrap::check_has_no_key(int rank) {
  if (!context_.store().try_get(fmt::format("join/{}", rank))) return;
  context_.fail(
      {Kind::Peer,
       fmt::format("rank {} has a run key, rank {} (pid {}) was given none. Hint: give all "
                   "ranks the same key (LIBDDP_RUN_KEY_FILE, or 'libddp run "
                   "--run-key-file' on every host).",
                   rank, rank_, ::getpid()),
       rank_, ::getpid()});
}

// Turns the sockets' errors into failures of the bootstrap. REQUIRES: `call` only moves bytes.
template <typename Call>
auto Bootstrap::talk_to(int other_rank, Call call) {
  try {
    return call();
  } catch (const NetworkError& error) {
    context_.fail_gone(context_.info(other_rank), error.what());
  } catch (const TimeoutError&) {
    context_.fail_timeout();
  }
}

void Bootstrap::connect_to(int lower_rank) {
  const PeerInfo& theirs = context_.info(lower_rank);
  UniqueFd control =
      talk_to(lower_rank, [&] { return connect_unix(theirs.socket_name, context_.deadline()); });
  const uid_t uid = peer_credentials(control.get()).uid;
  if (uid != ::geteuid()) {
    context_.fail(
        {Kind::Network,
         fmt::format("{} runs as user {}, {} as user {}. Hint: start all ranks as one user.",
                     theirs.who(), uid, context_.info(rank_).who(), ::geteuid()),
         lower_rank, theirs.pid});
  }
  const std::string request =
      LocalRequest{rank_, context_.info(rank_).token, theirs.token}.encode();
  talk_to(lower_rank,
          [&] { send_frame(control.get(), request, descriptors_, context_.deadline()); });
  // It cannot finish without this request, but may finish at any time after it.
  context_.reached(lower_rank);
  peer(lower_rank).control = std::move(control);
}

// Only a process of this user that has read both descriptions is let in. Anyone else is no reason
// to fail: the ranks that are missing still come.
void Bootstrap::take_request(AdmittedPeer& admitted) {
  LocalRequest request;
  try {
    request = LocalRequest::decode(admitted.request.bytes);
  } catch (const StoreError& error) {
    return acceptor_.refuse(error.what());
  }
  const int rank = request.rank;
  if (rank <= rank_ || rank >= context_.options().world_size || !is_local(rank) ||
      context_.is_linked(rank) || request.own_token != context_.info(rank).token ||
      request.their_token != context_.info(rank_).token) {
    return acceptor_.refuse("wrong rank or token");
  }
  talk_to(rank, [&] {
    send_frame(admitted.socket.get(), context_.info(rank_).token, descriptors_,
               context_.deadline());
  });
  context_.reached(rank);
  context_.linked(rank);
  peer(rank).control = std::move(admitted.socket);
  peer(rank).descriptors = std::move(admitted.request.descriptors);
}

void Bootstrap::read_answer(int lower_rank) {
  const int socket = peer(lower_rank).control.get();
  while (!wait_readable(socket, kInterruptPeriod)) context_.look_around();
  Frame frame = talk_to(lower_rank, [&] {
    return receive_frame(socket, UnixAcceptor::kLimits, context_.deadline());
  });
  if (frame.bytes != context_.info(lower_rank).token) {
    context_.fail({Kind::Network,
                   fmt::format("whoever answers for {} does not know its token. Hint: another "
                               "program uses its socket; start again.",
                               context_.info(lower_rank).who()),
                   lower_rank, context_.info(lower_rank).pid});
  }
  context_.linked(lower_rank);
  peer(lower_rank).descriptors = std::move(frame.descriptors);
}

}  // namespace

std::vector<GroupPeer> bootstrap(KeyValueStore& store, const BootstrapOptions& options,
                                 const std::vector<int>& descriptors, Deadline deadline) {
  return Bootstrap(store, options, descriptors, deadline).run();
}

void refuse_bootstrap(KeyValueStore& store, const BootstrapOptions& options,
                      const std::string& reason) noexcept {
  constexpr std::chrono::seconds kTimeToHear{5};
  if (options.world_size < 2) return;
  try {
    BootstrapContext context(store, options, Deadline::after(kTimeToHear));
    context.open();
    // Who reads the reason looks for the join entry of its author.
    if (BootstrapSession* session = context.session()) session->publish();
    context.announce(reason);
    if (options.rank == 0) context.wait_until_heard();
  } catch (const std::exception& error) {
    // The caller throws the reason; the others will time out.
    log(LogLevel::Warn, "bootstrap_refusal_not_told",
        {{"group", options.group_name}, {"reason", error.what()}});
  }
}

}  // namespace libddp
