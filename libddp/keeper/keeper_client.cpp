#include "libddp/keeper/keeper_client.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/keeper/keeper_key.h"
#include "libddp/slots/json_text.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {
namespace {

using Call = KeeperRequest::Call;

constexpr std::chrono::milliseconds kPauseBeforeRetry{10};

/// The keeper answers at once; it may be short of CPU time.
Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

}  // namespace

KeeperClient::KeeperClient(const std::string& run, const Role& role, Deadline deadline)
    : run_(run), rank_(role.rank) {
  KeeperRequest hello{.call = Call::Hello};
  hello.run = run;
  hello.is_worker = role.is_worker;
  hello.agent = role.agent;
  hello.rank = role.rank;
  const std::string name = keeper_name(run, role.host);
  std::string refusal;
  // The process that had the rank before may be about to end.
  while (!greet(name, hello, deadline, refusal)) {
    check_interrupt();
    ::poll(nullptr, 0, static_cast<int>(kPauseBeforeRetry.count()));
  }
}

bool KeeperClient::greet(const std::string& name, const KeeperRequest& hello, Deadline deadline,
                         std::string& refusal) {
  try {
    socket_ = connect_unix(name, deadline);
    // The name is anybody's to take: a stranger's keeper gets nothing.
    if (peer_credentials(socket_.get()).uid != ::geteuid()) {
      throw NetworkError("the keeper's name is taken by another user");
    }
    send_frame(socket_.get(), hello.encode(), {}, deadline);
    const Frame frame = receive_frame(socket_.get(), kKeeperLimits, deadline);
    const KeeperReply reply = KeeperReply::decode(frame.bytes);
    if (!reply.is_busy) reply.check();
    refusal = reply.error;
  } catch (const TimeoutError&) {
    if (refusal.empty()) throw;
  }
  if (!refusal.empty() && deadline.expired()) throw SnapshotError(refusal);
  return refusal.empty();
}

void KeeperClient::put(const SlotMemory& memory, const std::optional<KeeperStorage>& storage) {
  KeeperRequest request{.call = Call::Put};
  request.storage = storage;
  exchange(request, {memory.fd()}, soon());
}

std::vector<UniqueFd> KeeperClient::get() {
  return exchange({.call = Call::Get}, {}, soon()).descriptors;
}

void KeeperClient::store(const SlotMemory& memory, int slot, const KeeperStorage& storage) {
  const auto saved = memory.slot(slot).whole();
  if (!saved) throw StateError("libddp snapshot: a slot that is not whole cannot be stored.");
  KeeperRequest request{.call = Call::Store};
  request.rank = memory.identity().rank;
  request.generation = memory.identity().generation;
  request.slot = slot;
  request.sequence = saved->sequence;
  request.storage = storage;
  exchange(request, {}, soon());
}

void KeeperClient::wait(int rank, std::uint64_t sequence, Deadline deadline) {
  wait_for(Call::Wait, rank, 0, sequence, deadline);
}

void KeeperClient::wait_pull(int rank, std::uint64_t generation, std::uint64_t sequence,
                             Deadline deadline) {
  wait_for(Call::WaitPull, rank, generation, sequence, deadline);
}

void KeeperClient::wait_for(Call call, int rank, std::uint64_t generation, std::uint64_t sequence,
                            Deadline deadline) {
  KeeperRequest request{.call = call};
  request.rank = rank;
  request.generation = generation;
  request.sequence = sequence;
  exchange(request, {}, deadline);
}

bool KeeperClient::is_done(int rank, std::uint64_t sequence) {
  const nlohmann::json all = parse_json(status());
  for (const nlohmann::json& each : all.at("ranks")) {
    if (each.at("rank") != rank) continue;
    const nlohmann::json& stored = each.at("stored");
    const bool is_stored = stored.is_object() && stored.at("sequence") >= sequence;
    if (!is_stored && each.at("num_waiting") != 0) return false;
  }
  return true;
}

std::string KeeperClient::status() {
  return KeeperReply::decode(exchange({.call = Call::Status}, {}, soon()).bytes).status;
}

void KeeperClient::finish() {
  KeeperRequest request{.call = Call::Finish};
  request.rank = rank_;
  exchange(request, {}, soon());
}

void KeeperClient::complete(std::uint64_t sequence) {
  KeeperRequest request{.call = Call::Complete};
  request.sequence = sequence;
  send_frame(socket_.get(), request.encode(), {}, soon());
}

std::string KeeperClient::listen(const std::string& where, const RunKey& key) {
  KeeperRequest request{.call = Call::Listen};
  request.address = where;
  const UniqueFd passed = pass_keeper_key(key, run_);
  return KeeperReply::decode(exchange(request, {passed.get()}, soon()).bytes).address;
}

void KeeperClient::pull(const std::string& address, int rank, std::uint64_t generation,
                        std::uint64_t sequence, PullPurpose purpose) {
  KeeperRequest request{.call = Call::Pull};
  request.address = address;
  request.rank = rank;
  request.generation = generation;
  request.sequence = sequence;
  request.purpose = purpose;
  exchange(request, {}, soon());
}

Pulled KeeperClient::pulled(const std::vector<int>& ranks, std::uint64_t generation,
                            std::uint64_t sequence) {
  KeeperRequest request{.call = Call::Pulled};
  request.ranks = ranks;
  request.generation = generation;
  request.sequence = sequence;
  return KeeperReply::decode(exchange(request, {}, soon()).bytes).pulled;
}

std::string KeeperClient::store_newest(Deadline deadline) {
  while (true) {
    send_frame(socket_.get(), KeeperRequest{.call = Call::StoreNewest}.encode(), {}, soon());
    const KeeperReply reply =
        KeeperReply::decode(receive_frame(socket_.get(), kKeeperLimits, soon()).bytes);
    if (!reply.is_busy || deadline.expired()) {
      reply.check();
      return reply.status;
    }
    check_interrupt();
    ::poll(nullptr, 0, static_cast<int>(kPauseBeforeRetry.count()));
  }
}

Frame KeeperClient::exchange(const KeeperRequest& request, const std::vector<int>& descriptors,
                             Deadline deadline) {
  send_frame(socket_.get(), request.encode(), descriptors, deadline);
  Frame frame = receive_frame(socket_.get(), kKeeperLimits, deadline);
  KeeperReply::decode(frame.bytes).check();
  return frame;
}

}  // namespace libddp
