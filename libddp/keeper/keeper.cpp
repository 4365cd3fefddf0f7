#include "libddp/keeper/keeper.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/printable.h"
#include "libddp/slots/json_text.h"

namespace libddp {
namespace {

using nlohmann::json;
using Call = KeeperRequest::Call;

/// The longest sleep: deadlines need no more.
constexpr std::chrono::milliseconds kBeat{200};
constexpr std::chrono::milliseconds kReplyPatience{1'000};
/// So many are remembered: more than memories have slots for.
constexpr std::size_t kCompleteSaves = 8;

/// Another living process is the worker of that rank.
class RankTaken : public SnapshotError {
 public:
  using SnapshotError::SnapshotError;
};

void signal_process(int pidfd, int signal) {
  // Later than glibc 2.36 it has a name.
  constexpr long kPidfdSendSignal = 424;
  ::syscall(kPidfdSendSignal, pidfd, signal, nullptr, 0);
}

bool is_dead(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
}

json to_json(const SavedStep& saved) {
  return {{"step", saved.step}, {"sequence", saved.sequence}};
}

json slots_of(const SlotMemory& memory) {
  json slots = json::array();
  for (int i = 0; i < SlotMemory::kSlots; ++i) {
    const auto saved = memory.slot(i).whole();
    json slot = saved ? to_json(*saved) : json::object();
    slot["is_held"] = memory.slot(i).is_held();
    slots.push_back(std::move(slot));
  }
  return slots;
}

}  // namespace

Keeper::Keeper(Options options)
    : options_(std::move(options)), acceptor_(UnixListener::open_as(keeper_name(options_.run))) {}

void Keeper::run() {
  log(LogLevel::Info, "keeper_started", {{"run", options_.run}});
  do {
    serve();
  } while (!is_over());
  log(LogLevel::Info, "keeper_ended", {{"run", options_.run}});
}

void Keeper::serve() {
  std::vector<pollfd> entries{{stop_.fd(), POLLIN, 0}, {stored_.fd(), POLLIN, 0}};
  if (agent_) entries.push_back({agent_.get(), POLLIN, 0});
  for (const Client& client : clients_) entries.push_back({client.socket.get(), POLLIN, 0});
  acceptor_.add_polls(entries);
  ::poll(entries.data(), entries.size(), static_cast<int>(kBeat.count()));
  stored_.clear();
  if (agent_ && is_dead(agent_.get())) agent_died();
  admit();
  for (Client& client : clients_) {
    // First, so that what it has said is heard; a child may have inherited its connection.
    const bool has_died = client.is_worker && client.pidfd && is_dead(client.pidfd.get());
    hear(client);
    if (has_died) client.socket.reset();
  }
  clients_.remove_if([](const Client& client) { return !client.socket; });
  answer_waiting();
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
  client.pidfd = peer_pidfd(client.socket.get());
  client.is_worker = hello.is_worker;
  client.rank = hello.is_worker ? hello.rank : -1;
  if (!hello.is_worker) return;
  for (const Client& other : clients_) {
    const bool has_rank = other.is_worker && client.rank >= 0 && other.rank == client.rank;
    if (!has_rank || other.pid == client.pid) continue;
    if (other.pidfd && is_dead(other.pidfd.get())) continue;
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
      std::vector<int> returned;
      KeeperReply reply;
      try {
        const KeeperRequest request = KeeperRequest::decode(frame.bytes);
        if (request.call == Call::Wait) {
          client.waiting = request;
          return;
        }
        reply = answer(client, request, frame.descriptors, returned);
      } catch (const Error& error) {
        reply.error = error.what();
      }
      send_frame(client.socket.get(), reply.encode(), returned, Deadline::after(kReplyPatience));
    }
  } catch (const Error&) {
    client.socket.reset();  // it is gone, or no client of ours
  }
}

KeeperReply Keeper::answer(Client& client, const KeeperRequest& request,
                           std::vector<UniqueFd>& passed, std::vector<int>& returned) {
  KeeperReply reply;
  switch (request.call) {
    case Call::Put: {
      if (passed.size() != 1) throw SnapshotError("Put needs one memory");
      SlotMemory memory = SlotMemory::open(std::move(passed[0]));
      if (memory.identity().run != options_.run) throw SnapshotError("a memory of another run");
      if (!memories_.find(memory.identity().rank, memory.identity().generation)) {
        // Of a keeper that died.
        for (int i = 0; i < SlotMemory::kSlots; ++i) memory.slot(i).forget_readers();
      }
      memories_.put(std::move(memory));
      if (request.storage) storage_ = request.storage;
      has_finished_ = false;
      break;
    }
    case Call::Get:
      memories_.forget_old();
      for (const auto& memory : memories_.all()) returned.push_back(memory->fd());
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
    case Call::Complete:
      note_complete(request.sequence);
      break;
    case Call::Hello:
    case Call::Wait:
      throw SnapshotError("a call out of place");
  }
  return reply;
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
    const Persister::State state = persister_.state(client.waiting->rank);
    const bool is_stored = state.stored && state.stored->sequence >= client.waiting->sequence;
    if (!is_stored && state.num_waiting > 0) continue;
    KeeperReply reply;
    if (!is_stored) {
      reply.error =
          state.error.empty() ? "libddp snapshot: nothing was to be stored." : state.error;
    }
    client.waiting.reset();
    try {
      send_frame(client.socket.get(), reply.encode(), {}, Deadline::after(kReplyPatience));
    } catch (const Error&) {
      client.socket.reset();
    }
  }
  clients_.remove_if([](const Client& client) { return !client.socket; });
}

void Keeper::watch_agent(std::int64_t pid) {
  if (pid <= 0 || pid == agent_pid_) return;
  agent_ = open_pidfd(static_cast<pid_t>(pid));
  agent_pid_ = agent_ ? static_cast<pid_t>(pid) : 0;
}

void Keeper::agent_died() {
  log(LogLevel::Warn, "agent_died",
      {{"pid", static_cast<long>(agent_pid_)}, {"run", options_.run}});
  agent_.reset();
  agent_pid_ = 0;
  end_workers();
  store_newest();
}

void Keeper::end_workers() {
  const auto is_running = [](const Client& client) {
    return client.is_worker && client.pidfd && !is_dead(client.pidfd.get());
  };
  for (const Client& client : clients_) {
    if (is_running(client)) signal_process(client.pidfd.get(), SIGTERM);
  }
  const Deadline grace = Deadline::after(options_.grace);
  while (!grace.expired() && std::any_of(clients_.begin(), clients_.end(), is_running)) {
    ::poll(nullptr, 0, 10);
  }
  for (const Client& client : clients_) {
    if (!is_running(client)) continue;
    signal_process(client.pidfd.get(), SIGKILL);
    pollfd entry{client.pidfd.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(options_.grace.count()));
  }
}

void Keeper::store_newest() {
  const auto common = memories_.newest_common(complete_);
  if (!storage_ || !common) return;
  for (const auto& [memory, slot] : common->slots) {
    const auto stored = persister_.state(memory->identity().rank).stored;
    if (stored && stored->sequence >= common->saved.sequence) continue;
    persister_.add({.memory = memory, .slot = slot, .saved = common->saved, .storage = *storage_});
  }
}

void Keeper::note_complete(std::uint64_t sequence) {
  // A job that has gone back to an older save counts from there again; its ranks are never more
  // than one save apart.
  complete_.erase(complete_.upper_bound(sequence + 1), complete_.end());
  complete_.insert(sequence);
  while (complete_.size() > kCompleteSaves) complete_.erase(complete_.begin());
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
  if (!lingering_) lingering_ = Deadline::after(options_.linger);
  // A job that has finished, or has left nothing, needs only what is being stored.
  const bool has_nothing = has_served_ && !is_needed && memories_.is_empty();
  const bool is_done = (has_finished_ && clients_.empty()) || has_nothing;
  return lingering_->expired() || (is_done && persister_.is_idle());
}

std::string Keeper::status() const {
  json ranks = json::array();
  for (const auto& memory : memories_.all()) {
    const SlotIdentity& identity = memory->identity();
    const Persister::State state = persister_.state(identity.rank);
    ranks.push_back({{"rank", identity.rank},
                     {"world_size", identity.world_size},
                     {"generation", identity.generation},
                     {"bytes", memory->layout().data_bytes()},
                     {"slots", slots_of(*memory)},
                     {"stored", state.stored ? to_json(*state.stored) : json()},
                     {"num_waiting", state.num_waiting},
                     {"error", state.error}});
  }
  json workers = json::array();
  for (const Client& client : clients_) {
    if (client.is_worker) workers.push_back({{"pid", client.pid}, {"rank", client.rank}});
  }
  return to_text({{"run", options_.run},
                  {"pid", ::getpid()},
                  {"agent", agent_pid_},
                  {"workers", std::move(workers)},
                  {"complete", complete_},
                  {"ranks", std::move(ranks)}});
}

}  // namespace libddp
