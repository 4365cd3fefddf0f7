#include "libddp/host/message_batch.h"

#include <algorithm>
#include <set>
#include <utility>

namespace libddp {
namespace {

bool is_hopeless(const Comm::Transfer& transfer, const std::vector<Departure>& departures,
                 int peer) {
  const Departure& departure = departures[static_cast<std::size_t>(peer)];
  if (departure.has_left) return true;
  // Those of collectives have tags of their own.
  if (transfer.tag < 0) return false;
  return transfer.is_send ? departure.receives_nothing : departure.sends_nothing;
}

}  // namespace

bool MessageBatch::is_done() const {
  return std::all_of(transfers.begin(), transfers.end(),
                     [](const Comm::Transfer& transfer) { return transfer.is_done; });
}

void MessageBatch::append_unfinished(std::vector<Comm::Transfer*>& unfinished) {
  for (Comm::Transfer& transfer : transfers) {
    if (!transfer.is_done) unfinished.push_back(&transfer);
  }
}

int MessageBatch::source_rank() const {
  for (const Comm::Transfer& transfer : transfers) {
    if (!transfer.is_send) return transfer.source;
  }
  return -1;
}

std::optional<int> MessageBatch::first_missing(const std::vector<Departure>& departures,
                                               int own_rank) const {
  for (const Comm::Transfer& transfer : transfers) {
    if (transfer.is_done) continue;
    if (transfer.peer >= 0) {
      if (is_hopeless(transfer, departures, transfer.peer)) return transfer.peer;
      continue;
    }
    // From any source: hopeless only when it is from each of the others.
    bool is_hopeless_from_all = true;
    for (int rank = 0; rank < static_cast<int>(departures.size()); ++rank) {
      is_hopeless_from_all =
          is_hopeless_from_all && (rank == own_rank || is_hopeless(transfer, departures, rank));
    }
    if (is_hopeless_from_all) return own_rank == 0 ? 1 : 0;
  }
  return std::nullopt;
}

bool MessageBatch::is_awaited(const std::vector<Departure>& departures) const {
  return std::any_of(transfers.begin(), transfers.end(), [&](const Comm::Transfer& transfer) {
    return !transfer.is_done && transfer.peer >= 0 &&
           !is_hopeless(transfer, departures, transfer.peer);
  });
}

bool MessageBatch::has_unfinished(bool is_send) const {
  return std::any_of(transfers.begin(), transfers.end(), [&](const Comm::Transfer& transfer) {
    return !transfer.is_done && transfer.is_send == is_send;
  });
}

std::string MessageBatch::unfinished_peers(const std::vector<std::string>& peer_names) const {
  std::set<int> peers;
  for (const Comm::Transfer& transfer : transfers) {
    if (!transfer.is_done) peers.insert(transfer.peer);
  }
  std::string text;
  for (int peer : peers) {
    if (!text.empty()) text += ", ";
    text += peer < 0 ? "any rank" : peer_names[static_cast<std::size_t>(peer)];
  }
  return text;
}

std::vector<int> MessageBatch::unfinished_ranks(int own_rank, int world_size) const {
  std::set<int> ranks;
  for (const Comm::Transfer& transfer : transfers) {
    if (transfer.is_done) continue;
    const bool is_any = transfer.peer < 0;
    const int end = is_any ? world_size : transfer.peer + 1;
    for (int rank = is_any ? 0 : transfer.peer; rank < end; ++rank) ranks.insert(rank);
  }
  ranks.erase(own_rank);
  return {ranks.begin(), ranks.end()};
}

std::shared_ptr<MessageBatch> make_batch(BackendCall call, const std::vector<Exchange>& parts,
                                         std::uint64_t sequence, std::optional<int> tag) {
  auto batch = std::make_shared<MessageBatch>();
  batch->description = call.description;
  batch->timeout = call.timeout;
  batch->deadline = Deadline::after(call.timeout);
  batch->on_success = std::move(call.on_success);
  batch->work = std::make_shared<Work>(call.description, sequence, std::move(call.results));
  batch->transfers.reserve(parts.size());
  batch->tensors.reserve(parts.size());
  for (const Exchange& part : parts) {
    Comm::Transfer transfer;
    transfer.is_send = part.direction == Exchange::Direction::Send;
    transfer.peer = part.peer;
    transfer.tag = tag.value_or(part.tag);
    transfer.data = part.tensor.data_ptr();
    transfer.bytes = part.tensor.nbytes();
    transfer.description = call.description;
    batch->transfers.push_back(transfer);
    batch->tensors.push_back(part.tensor);
  }
  return batch;
}

}  // namespace libddp
