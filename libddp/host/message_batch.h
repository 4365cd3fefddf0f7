#pragma once

// One batch of transfers in flight, as the message queue keeps it.
// Thread rule: belongs to the queue; the transfers belong to the thread that drives.
//
//   MessageBatch batch = make_batch(call, parts, Deadline::after(call.timeout), std::nullopt);
//   comm.progress(batch.unfinished());

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/collectives/comm.h"
#include "libddp/group/backend.h"
#include "libddp/watchdog/departure.h"

namespace libddp {

struct MessageBatch {
  WorkPtr work;
  OpDescription description;
  std::chrono::milliseconds timeout{};
  Deadline deadline = Deadline::never();
  std::vector<Comm::Transfer> transfers;
  /// Kept alive: the transfers point into them.
  std::vector<at::Tensor> tensors;
  std::function<void()> on_success;
  /// Not on the queue's list any more; its Work is done or about to be.
  bool is_retired = false;
  /// In the flight log; 0 = none.
  std::uint64_t ticket = 0;

  bool is_done() const;
  void append_unfinished(std::vector<Comm::Transfer*>& transfers);
  /// Rank that the first receive came from; -1 if there is none.
  int source_rank() const;
  /// The first rank that a part still needs, and that will do nothing for it any more.
  std::optional<int> first_missing(const std::vector<Departure>& departures, int own_rank) const;
  /// Whether some rank that would still do something for it may wait for a part that is not done.
  bool is_awaited(const std::vector<Departure>& departures) const;
  /// Whether a part is not done, of those that are sends, or of those that are not.
  bool has_unfinished(bool is_send) const;
  /// "rank 1, rank 3": the peers of what is not done.
  std::string unfinished_peers(const std::vector<std::string>& peer_names) const;
  /// Their ranks; all others of `world_size` where any of them would do.
  std::vector<int> unfinished_ranks(int own_rank, int world_size) const;
};

/// `tag` overrides those of the parts.
std::shared_ptr<MessageBatch> make_batch(BackendCall call, const std::vector<Exchange>& parts,
                                         std::uint64_t sequence, std::optional<int> tag);

}  // namespace libddp
