#include "libddp/cuda/nccl_rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// NCCL's roots serve their ranks one after another.
constexpr int kRanksPerRoot = 128;
constexpr std::size_t kMostNames = 16;

int num_roots(int world_size) { return (world_size + kRanksPerRoot - 1) / kRanksPerRoot; }

/// Roots are spread over the ranks, as NCCL expects them: of rank r, r * roots / ranks.
int rank_of_root(int root, int roots, int world_size) {
  return static_cast<int>((static_cast<std::int64_t>(root) * world_size + roots - 1) / roots);
}

std::string id_text(const ncclUniqueId& id) { return {id.internal, sizeof(id.internal)}; }

ncclUniqueId id_of(const std::string& text, const NcclMeeting& meeting) {
  ncclUniqueId id;
  if (text.size() != sizeof(id.internal)) {
    throw StoreError(fmt::format(
        "{}: the store holds {} bytes where an id of NCCL has {}. Hint: give each run a store of "
        "its own.",
        meeting.where, text.size(), sizeof(id.internal)));
  }
  std::memcpy(id.internal, text.data(), text.size());
  return id;
}

std::string here_key(const NcclMeeting& meeting, int rank) {
  return fmt::format("{}here/{}", meeting.name, rank);
}

[[noreturn]] void refuse_missing(KeyValueStore& store, const NcclMeeting& meeting) {
  std::vector<int> missing;
  for (int rank = 0; rank < meeting.world_size && missing.size() < kMostNames; ++rank) {
    if (!store.try_get(here_key(meeting, rank))) missing.push_back(rank);
  }
  throw TimeoutError(fmt::format(
      "{}: timed out waiting for rank(s) {} to make the communicator for device tensors. Hint: the "
      "first collective on device tensors must be called by all ranks of the group.",
      meeting.where, fmt::join(missing, ", ")));
}

}  // namespace

std::vector<ncclUniqueId> meet(const NcclApi& api, KeyValueStore& store, const NcclMeeting& meeting,
                               Deadline deadline) {
  const int roots = num_roots(meeting.world_size);
  const auto id_key = [&](int root) { return fmt::format("{}id/{}", meeting.name, root); };
  for (int root = 0; root < roots; ++root) {
    if (rank_of_root(root, roots, meeting.world_size) != meeting.rank) continue;
    ncclUniqueId id;
    check_nccl(api, api.get_unique_id(&id), nullptr, meeting.where);
    store.set(id_key(root), id_text(id));
  }
  // The last one to come opens the door for all.
  store.set(here_key(meeting, meeting.rank), "1");
  const std::string open = meeting.name + "all";
  if (store.add(meeting.name + "count", 1) == meeting.world_size) store.set(open, "1");
  if (!store.wait_get(open, deadline)) refuse_missing(store, meeting);
  std::vector<ncclUniqueId> ids;
  for (int root = 0; root < roots; ++root) {
    const auto text = store.wait_get(id_key(root), deadline);
    if (!text) refuse_missing(store, meeting);
    ids.push_back(id_of(*text, meeting));
  }
  return ids;
}

}  // namespace libddp
