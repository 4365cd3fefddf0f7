#include "libddp/host/message_batch.h"

#include <algorithm>
#include <set>
#include <utility>

namespace libddp {

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

std::optional<int> MessageBatch::first_missing(const std::vector<bool>& is_gone,
                                               int own_rank) const {
  for (const Comm::Transfer& transfer : transfers) {
    if (transfer.is_done) continue;
    if (transfer.peer >= 0) {
      if (is_gone[static_cast<std::size_t>(transfer.peer)]) return transfer.peer;
      continue;
    }
    // From any source: hopeless only when all others have left.
    bool is_hopeless = true;
    for (std::size_t rank = 0; rank < is_gone.size(); ++rank) {
      is_hopeless = is_hopeless && (is_gone[rank] || static_cast<int>(rank) == own_rank);
    }
    if (is_hopeless) return own_rank == 0 ? 1 : 0;
  }
  return std::nullopt;
}

bool MessageBatch::is_awaited(const std::vector<bool>& is_gone) const {
  return std::any_of(transfers.begin(), transfers.end(), [&](const Comm::Transfer& transfer) {
    return !transfer.is_done && transfer.peer >= 0 &&
           !is_gone[static_cast<std::size_t>(transfer.peer)];
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
