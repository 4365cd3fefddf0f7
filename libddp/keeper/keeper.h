#pragma once

// A small process of each host that holds the memories of its ranks (SlotMemory), so that they
// outlive the processes that write them; a new start of the job takes them from here.
//
// It serves processes of its own user over a Unix socket in the abstract namespace and trusts
// nothing in what they send: memories are opened with all checks, messages have limits. It stores
// slots in the background (Persister). When the agent that started the workers dies, it ends the
// workers, stores the newest save that is whole on all ranks of the job, as far as it was told,
// else the newest that all ranks of the host have whole, and waits for a new agent; when nobody
// needs it any more it ends, and the memories with it.
//
// NOTE [Who a worker is]
// A rank has one worker at a time: a second job that uses the same run would overwrite the first
// one's memories. It is the process that has connected, as the kernel names it, and lives as long
// as that process does: a data loader's worker that has inherited the connection neither keeps the
// rank nor the keeper alive. Thread rule: run() in one thread; stop() in any.
//
//   Keeper keeper({.run = "job 7", .linger = std::chrono::seconds(60)});
//   keeper.run();

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/event_fd.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/unix_acceptor.h"
#include "libddp/keeper/host_memories.h"
#include "libddp/keeper/keeper_message.h"
#include "libddp/keeper/persister.h"
#include "libddp/keeper/replication.h"
#include "libddp/transport/process_handle.h"

namespace libddp {

class Keeper {
 public:
  struct Options {
    /// Of the job; at most 63 bytes.
    std::string run;
    /// So long it stays with memories that nobody is connected for.
    std::chrono::milliseconds linger{60'000};
    /// What workers have to end by themselves when their agent has died, before they are killed.
    std::chrono::milliseconds grace{1'000};
    /// Which of the hosts that share this machine: keeper_name().
    std::string host = {};
    /// For other hosts' keepers, to all of them together; 0 = no limit.
    std::uint64_t bytes_per_second = 0;
    /// So long nothing may move on a connection to another keeper.
    std::chrono::milliseconds patience{10'000};
    /// ReplicaPuller::Options has it.
    std::chrono::milliseconds next_pause{5'000};
    /// So long nothing may move of what is being stored, when nobody is there any more.
    std::chrono::milliseconds storage_patience{120'000};
    /// What replicas may take.
    std::function<MemoryLimit()> memory_limit = libddp::memory_limit;
  };

  /// Listens. Throws NetworkError if the job has a keeper on this host already.
  explicit Keeper(Options options);

  /// Until the job has finished, or nobody has come back in time.
  void run();
  void stop() { stop_.set(); }

 private:
  struct Client {
    UniqueFd socket;
    ProcessHandle process;
    pid_t pid = 0;
    bool is_worker = false;
    int rank = -1;
    /// Waits for the saves of a rank: Wait, WaitPull.
    std::optional<KeeperRequest> waiting;
  };

  void serve();
  void admit();
  void hear(Client& client);
  /// What all have said until now.
  void hear_clients();
  /// What writers had reserved that are gone: nobody would get what is in there.
  void release_slots();
  void take_in(Client& client, const KeeperRequest& hello);
  KeeperReply answer(Client& client, const KeeperRequest& request, std::vector<UniqueFd>& passed,
                     std::vector<HostMemories::Memory>& returned);
  std::optional<KeeperReply> answer_to_wait(const KeeperRequest& request) const;
  void put(const KeeperRequest& request, std::vector<UniqueFd>& passed);
  void pull(const KeeperRequest& request);
  Pulled pulled(const KeeperRequest& request) const;
  void arrived(KeptReplicas::Replica replica, const ReplicaPuller::Job& job);
  void answer_waiting();
  void watch_agent(std::int64_t pid);
  void agent_died();
  void end_workers();
  void store(const KeeperRequest& request);
  void store_newest();
  KeeperReply store_newest_held();
  bool is_over();
  std::string status() const;

  const Options options_;
  EventFd stop_ = EventFd::create();
  /// A save has been stored, or has come.
  EventFd changed_ = EventFd::create();
  UnixAcceptor acceptor_;
  HostMemories memories_;
  std::list<Client> clients_;
  std::optional<KeeperStorage> storage_;
  ProcessHandle agent_;
  pid_t agent_pid_ = 0;
  /// Workers have named an agent that is dead: until then they have time.
  std::optional<Deadline> agent_lost_;
  bool has_finished_ = false;
  /// A worker has been here: until then it waits for one.
  bool has_served_ = false;
  /// Since when nobody is there.
  std::optional<Deadline> lingering_;
  /// Last: their threads call back.
  Persister persister_{[this] { changed_.set(); }};
  Replication replication_;
};

}  // namespace libddp
