#include "libddp/keeper/keeper.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/printable.h"
#include "libddp/keeper/keeper_key.h"
#include "libddp/slots/json_text.h"

namespace libddp {
namespace {

using nlohmann::json;
using Call = KeeperRequest::Call;

/// The longest sleep: deadlines need no more.
constexpr std::chrono::milliseconds kBeat{200};
constexpr std::chrono::milliseconds kReplyPatience{1'000};
/// For workers whose agent is dead already to hand over what they have.
constexpr std::chrono::milliseconds kHandOver{500};
/// For the first client of a keeper.
constexpr std::chrono::milliseconds kFirstPatience{5'000};

/// Another living process is the worker of that rank.
class RankTaken : public SnapshotError {
 public:
  using SnapshotError::SnapshotError;
};

/// Null where its writer has reserved it; else nobody writes it until this ends.
std::shared_ptr<void> held(const HostMemories::Memory& memory, int slot) {
  if (!memory->slot(slot).try_hold()) return nullptr;
  return {&memory->slot(slot), [memory](void* held) { static_cast<Slot*>(held)->release(); }};
}

json to_json(const SavedStep& saved) {
  return {{"step", saved.step}, {"sequence", saved.sequence}};
}

json to_json(const HostMemories::Memory& memory, bool is_replica) {
  json slots = json::array();
  for (int i = 0; i < SlotMemory::kSlots; ++i) {
    const bool is_held = memory->slot(i).is_held();
    const auto saved = is_replica ? saved_in_replica(memory, i) : memory->slot(i).whole();
    json slot = saved ? to_json(*saved) : json::object();
    slot["is_held"] = is_held;
    slots.push_back(std::move(slot));
  }
  return {{"rank", memory->identity().rank},
          {"world_size", memory->identity().world_size},
          {"generation", memory->identity().generation},
          {"bytes", memory->layout().data_bytes()},
          {"slots", std::move(slots)}};
}

}  // namespace

Keeper::Keeper(Options options)
    : options_(std::move(options)),
      acceptor_(UnixListener::open_as(keeper_name(options_.run, options_.host))),
      replication_(
          {.run = options_.run,
           .bytes_per_second = options_.bytes_per_second,
           .patience = options_.patience,
           .next_pause = options_.next_pause,
           .memory_limit = options_.memory_limit},
          memories_.replicas(), [this](const ReplicaPlace& place) { return memories_.lend(place); },
          [this](KeptReplicas::Replica replica, const ReplicaPuller::Job& job) {
            arrived(std::move(replica), job);
          },
          [this] { changed_.set(); }) {}

void Keeper::run() {
  log(LogLevel::Info, "keeper_started", {{"run", options_.run}});
  do {
    serve();
  } while (!is_over());
  log(LogLevel::Info, "keeper_ended", {{"run", options_.run}});
}

void Keeper::serve() {
  std::vector<pollfd> entries{{stop_.fd(), POLLIN, 0}, {changed_.fd(), POLLIN, 0}};
  entries.push_back({agent_.fd(), POLLIN, 0});  // a negative one is passed over
  for (const Client& client : clients_) entries.push_back({client.socket.get(), POLLIN, 0});
  acceptor_.add_polls(entries);
  ::poll(entries.data(), entries.size(), static_cast<int>(kBeat.count()));
  changed_.clear();
  if (agent_.has_ended()) agent_died();
  if (agent_lost_ && agent_lost_->expired()) agent_died();
  admit();
  hear_clients();
  answer_waiting();
}

void Keeper::hear_clients() {
  for (Client& client : clients_) {
    // First, so that what it has said is heard; a child may have inherited its connection.
    const bool has_died = client.is_worker && client.process.has_ended();
    hear(client);
    if (has_died) client.socket.reset();
  }
  release_slots();
  clients_.remove_if([](const Client& client) { return !client.socket; });
}

void Keeper::release_slots() {
  const auto may_write = [](const Client& client) {
    return client.is_worker && client.socket && !client.process.has_ended();
  };
  for (const Client& client : clients_) {
    if (!client.is_worker || client.rank < 0 || may_write(client)) continue;
    const bool has_successor = std::any_of(
        clients_.begin(), clients_.end(),
        [&](const Client& other) { return other.rank == client.rank && may_write(other); });
    if (!has_successor) memories_.unreserve(client.rank);
  }
}

void Keeper::admit() {
  for (AdmittedPeer& admitted : acceptor_.admit(std::chrono::milliseconds(0))) {
    Client client;
    client.socket = std::move(admitted.socket);
    KeeperReply reply;
    try {
      const KeeperRequest hello = KeeperRequest::decode(admitted.request.bytes);
      if (hello.call != Call::Hello || hello.run != options_.run) {
        throw SnapshotError("a keeper of another run");
      }
      take_in(client, hello);
    } catch (const RankTaken& error) {
      reply.error = error.what();
      reply.is_busy = true;  // for a restarted rank, whose process before is about to end
    } catch (const Error& error) {
      reply.error = error.what();
      acceptor_.refuse(reply.error);
    }
    try {
      send_frame(client.socket.get(), reply.encode(), {}, Deadline::after(kReplyPatience));
    } catch (const Error&) {
      continue;  // it is gone
    }
    has_served_ = has_served_ || client.is_worker;
    if (reply.error.empty()) clients_.push_back(std::move(client));
  }
}

void Keeper::take_in(Client& client, const KeeperRequest& hello) {
  client.pid = peer_credentials(client.socket.get()).pid;
  client.process = ProcessHandle::of_peer(client.socket.get());
  client.is_worker = hello.is_worker;
  client.rank = hello.is_worker ? hello.rank : -1;
  if (!hello.is_worker) return;
  for (const Client& other : clients_) {
    const bool has_rank = other.is_worker && client.rank >= 0 && other.rank == client.rank;
    if (!has_rank || other.pid == client.pid) continue;
    if (other.process.has_ended()) {
      memories_.unreserve(other.rank);  // before its successor reserves some
      continue;
    }
    throw RankTaken(fmt::format(
        "libddp snapshot: rank {} of run '{}' is held by process {}: another job uses the same run "
        "or folder. Hint: end that job, or give this one a folder and a run of its own.",
        client.rank, printable(options_.run), other.pid));
  }
  watch_agent(hello.agent);
}

void Keeper::hear(Client& client) {
  try {
    while (is_frame_complete(client.socket.get(), kKeeperLimits)) {
      Frame frame =
          receive_frame(client.socket.get(), kKeeperLimits, Deadline::after(kReplyPatience));
      // Held until they are sent.
      std::vector<HostMemories::Memory> returned;
      KeeperReply reply;
      try {
        const KeeperRequest request = KeeperRequest::decode(frame.bytes);
        if (request.call == Call::Wait || request.call == Call::WaitPull) {
          client.waiting = request;
          return;
        }
        if (request.call == Call::Complete) {
          memories_.note_complete(request.sequence);
          continue;  // nobody waits for an answer
        }
        reply = answer(client, request, frame.descriptors, returned);
      } catch (const Error& error) {
        reply.error = error.what();
      }
      std::vector<int> descriptors;
      for (const auto& memory : returned) descriptors.push_back(memory->fd());
      send_frame(client.socket.get(), reply.encode(), descriptors, Deadline::after(kReplyPatience));
    }
  } catch (const Error&) {
    client.socket.reset();  // it is gone, or no client of ours
  }
}

KeeperReply Keeper::answer(Client& client, const KeeperRequest& request,
                           std::vector<UniqueFd>& passed,
                           std::vector<HostMemories::Memory>& returned) {
  KeeperReply reply;
  switch (request.call) {
    case Call::Put:
      put(request, passed);
      break;
    case Call::Get:
      memories_.forget_old();
      returned = memories_.own();
      for (auto& memory : memories_.replicas().all()) returned.push_back(std::move(memory));
      break;
    case Call::Store:
      store(request);
      break;
    case Call::Status:
      reply.status = status();
      break;
    case Call::Finish:
      has_finished_ = true;
      client.is_worker = false;
      memories_.forget_rank(request.rank);
      break;
    case Call::Listen:
      if (passed.size() != 1) throw SnapshotError("Listen needs one key");
      reply.address = replication_.listen(request.address, take_keeper_key(passed[0]));
      break;
    case Call::Pull:
      pull(request);
      break;
    case Call::Pulled:
      reply.pulled = pulled(request);
      break;
    case Call::StoreNewest:
      reply = store_newest_held();
      break;
    case Call::Hello:
    case Call::Wait:
    case Call::WaitPull:
    case Call::Complete:
      throw SnapshotError("a call out of place");
  }
  return reply;
}

void Keeper::put(const KeeperRequest& request, std::vector<UniqueFd>& passed) {
  if (passed.size() != 1) throw SnapshotError("Put needs one memory");
  SlotMemory memory = SlotMemory::open(std::move(passed[0]));
  if (memory.identity().run != options_.run) throw SnapshotError("a memory of another run");
  if (!memories_.is_known(memory)) {
    // Of a keeper that died.
    for (int i = 0; i < SlotMemory::kSlots; ++i) memory.slot(i).forget_readers();
  }
  memories_.put(std::move(memory));
  if (request.storage) storage_ = request.storage;
  has_finished_ = false;
}

void Keeper::pull(const KeeperRequest& request) {
  using Whose = HostMemories::Whose;
  const ReplicaPuller::Job job{.from = parse_endpoint(request.address),
                               .rank = request.rank,
                               .generation = request.generation,
                               .sequence = request.sequence,
                               .purpose = request.purpose};
  if (job.rank < 0) throw SnapshotError("Pull needs a rank");
  const Whose whose = memories_.where(job.rank, job.generation, job.sequence);
  if (whose == Whose::Replica && job.purpose == PullPurpose::Own) {
    memories_.adopt(job.rank, job.generation);
  }
  if (whose == Whose::Nobody) replication_.pull(job);
}

Pulled Keeper::pulled(const KeeperRequest& request) const {
  Pulled worst = Pulled::Here;
  for (const int rank : request.ranks) {
    const bool is_coming = replication_.is_coming(rank, request.generation, request.sequence);
    // After that: what has come since then counts, too.
    const auto whose = memories_.where(rank, request.generation, request.sequence);
    if (whose != HostMemories::Whose::Nobody) continue;
    worst = std::min(worst, is_coming ? Pulled::Coming : Pulled::Failed);
  }
  return worst;
}

void Keeper::arrived(KeptReplicas::Replica replica, const ReplicaPuller::Job& job) {
  if (job.purpose == PullPurpose::Own) {
    memories_.put(std::move(*replica.memory));
  } else {
    memories_.put_replica(std::move(replica));
  }
}

void Keeper::store(const KeeperRequest& request) {
  if (!request.storage) throw SnapshotError("Store needs a folder");
  const auto memory = memories_.find(request.rank, request.generation);
  if (!memory || request.slot < 0 || request.slot >= SlotMemory::kSlots) {
    throw SnapshotError(fmt::format("no memory of rank {}, layout {}, slot {} is here",
                                    request.rank, request.generation, request.slot));
  }
  const auto saved = memory->slot(request.slot).whole();
  if (!saved || saved->sequence != request.sequence) {
    throw SnapshotError("the slot holds another save than the one to store");
  }
  storage_ = request.storage;
  persister_.add(
      {.memory = memory, .slot = request.slot, .saved = *saved, .storage = *request.storage});
}

void Keeper::answer_waiting() {
  for (Client& client : clients_) {
    if (!client.waiting) continue;
    const auto reply = answer_to_wait(*client.waiting);
    if (!reply) continue;
    client.waiting.reset();
    try {
      send_frame(client.socket.get(), reply->encode(), {}, Deadline::after(kReplyPatience));
    } catch (const Error&) {
      client.socket.reset();
    }
  }
  clients_.remove_if([](const Client& client) { return !client.socket; });
}

std::optional<KeeperReply> Keeper::answer_to_wait(const KeeperRequest& request) const {
  KeeperReply reply;
  if (request.call == Call::WaitPull) {
    const ReplicaPuller::State state = replication_.state(request.rank);
    // After the state: what has come since then counts, too.
    if (memories_.has_since(request.rank, request.generation, request.sequence)) return reply;
    if (state.num_waiting > 0) return std::nullopt;
    reply.error = state.error.empty() ? "libddp snapshot: nothing was to be pulled." : state.error;
    return reply;
  }
  const Persister::State state = persister_.state(request.rank);
  if (state.stored && state.stored->sequence >= request.sequence) return reply;
  if (state.num_waiting > 0) return std::nullopt;
  reply.error = state.error.empty() ? "libddp snapshot: nothing was to be stored." : state.error;
  return reply;
}

void Keeper::watch_agent(std::int64_t pid) {
  if (pid <= 0 || pid == agent_pid_) return;
  agent_ = ProcessHandle(static_cast<pid_t>(pid));
  agent_pid_ = static_cast<pid_t>(pid);
  agent_lost_.reset();
  // It died with the keeper before this one: its workers hand their memories over before they end.
  if (agent_.has_ended()) {
    agent_ = ProcessHandle();
    agent_lost_ = Deadline::after(kHandOver);
  }
}

void Keeper::agent_died() {
  log(LogLevel::Warn, "agent_died",
      {{"pid", static_cast<long>(agent_pid_)}, {"run", options_.run}});
  agent_ = ProcessHandle();
  agent_lost_.reset();
  agent_pid_ = 0;
  // What they have said while it lived; what they say as they are ended is too late.
  hear_clients();
  end_workers();
  release_slots();
  store_newest();
}

void Keeper::end_workers() {
  const auto is_running = [](const Client& client) {
    return client.is_worker && client.process && !client.process.has_ended();
  };
  for (const Client& client : clients_) {
    if (is_running(client)) client.process.signal(SIGTERM);
  }
  const Deadline grace = Deadline::after(options_.grace);
  while (!grace.expired() && std::any_of(clients_.begin(), clients_.end(), is_running)) {
    ::poll(nullptr, 0, 10);
  }
  for (const Client& client : clients_) {
    if (!is_running(client)) continue;
    client.process.signal(SIGKILL);
    client.process.has_ended(options_.grace);
  }
}

void Keeper::store_newest() {
  const auto common = memories_.newest_common();
  if (!storage_ || !common) return;
  for (const auto& [memory, slot] : common->slots) {
    const auto stored = persister_.state(memory->identity().rank).stored;
    if (stored && stored->sequence >= common->saved.sequence) continue;
    persister_.add({.memory = memory, .slot = slot, .saved = common->saved, .storage = *storage_});
  }
}

/// For a job that goes on: all ranks store the same save, whatever is saved meanwhile.
KeeperReply Keeper::store_newest_held() {
  const std::string run = printable(options_.run);
  if (!storage_) {
    throw SnapshotError(fmt::format(
        "libddp snapshot: run '{}' stores in no folder. Hint: make its Snapshot with one.", run));
  }
  const auto common = memories_.newest_common();
  if (!common) {
    throw SnapshotError(fmt::format(
        "libddp snapshot: no save of run '{}' is whole on all of this host's ranks. Hint: wait for "
        "the first one.",
        run));
  }
  KeeperReply reply;
  std::vector<Persister::Job> jobs;
  json ranks = json::array();
  for (const auto& [memory, slot] : common->slots) {
    const int rank = memory->identity().rank;
    ranks.push_back(rank);
    const auto stored = persister_.state(rank).stored;
    if (stored && stored->sequence >= common->saved.sequence) continue;
    jobs.push_back({.memory = memory, .slot = slot, .saved = common->saved, .storage = *storage_});
    jobs.back().hold = held(memory, slot);
    if (!jobs.back().hold || memory->slot(slot).whole() != common->saved) {
      reply.error = fmt::format("libddp snapshot: run '{}' is saving. Hint: ask again.", run);
      reply.is_busy = true;
      return reply;
    }
  }
  for (Persister::Job& job : jobs) persister_.add(std::move(job));
  json told = to_json(common->saved);
  told["ranks"] = std::move(ranks);
  told["world_size"] = common->slots.front().first->identity().world_size;
  told["folder"] = storage_->folder;
  reply.status = to_text(told);
  return reply;
}

bool Keeper::is_over() {
  pollfd entry{stop_.fd(), POLLIN, 0};
  if (::poll(&entry, 1, 0) == 1) return true;
  const bool is_needed = agent_ || std::any_of(clients_.begin(), clients_.end(),
                                               [](const Client& each) { return each.is_worker; });
  if (is_needed && !has_finished_) {
    lingering_.reset();
    return false;
  }
  // Whoever has started it comes at once, but not before it listens.
  const auto patience = has_served_ ? options_.linger : std::max(options_.linger, kFirstPatience);
  if (!lingering_) lingering_ = Deadline::after(patience);
  // A job that has finished, or has left nothing, needs only what is being stored.
  const bool has_nothing = has_served_ && !is_needed && memories_.is_empty();
  const bool is_done = (has_finished_ && clients_.empty()) || has_nothing;
  if (is_done && persister_.is_idle()) return true;
  // What is on its way to storage is finished as long as it gets anywhere.
  return lingering_->expired() && !persister_.is_moving(options_.storage_patience);
}

std::string Keeper::status() const {
  json ranks = json::array();
  for (const auto& memory : memories_.own()) {
    const Persister::State state = persister_.state(memory->identity().rank);
    json rank = to_json(memory, false);
    rank["stored"] = state.stored ? to_json(*state.stored) : json();
    rank["num_waiting"] = state.num_waiting;
    rank["error"] = state.error;
    ranks.push_back(std::move(rank));
  }
  json replicas = json::array();
  for (const auto& memory : memories_.replicas().all()) {
    const ReplicaPuller::State state = replication_.state(memory->identity().rank);
    json replica = to_json(memory, true);
    replica["num_waiting"] = state.num_waiting;
    replica["error"] = state.error;
    replicas.push_back(std::move(replica));
  }
  json workers = json::array();
  for (const Client& client : clients_) {
    if (client.is_worker) workers.push_back({{"pid", client.pid}, {"rank", client.rank}});
  }
  return to_text({{"run", options_.run},
                  {"pid", ::getpid()},
                  {"agent", agent_pid_},
                  {"workers", std::move(workers)},
                  {"complete", memories_.complete()},
                  {"address", replication_.address()},
                  {"ranks", std::move(ranks)},
                  {"replicas", std::move(replicas)}});
}

}  // namespace libddp
