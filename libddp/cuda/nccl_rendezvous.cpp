#include "libddp/cuda/nccl_rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <utility>

#include "libddp/base/env.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

/// NCCL's roots serve their ranks one after another.
constexpr int kRanksPerRoot = 128;
constexpr std::size_t kMostNames = 16;
constexpr const char* kOpen = "1";

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

std::string shared_key(const NcclMeeting& meeting) { return meeting.name + "shared"; }

/// Who comes second to a device says so, before it counts as here: whoever opens the door knows.
void claim_device(KeyValueStore& store, const NcclMeeting& meeting, Deadline deadline) {
  const std::string key = fmt::format("{}device/{}", meeting.name, meeting.device_identity);
  if (store.add(key, 1) == 1) return store.set(key + "/rank", std::to_string(meeting.rank));
  const auto first = store.wait_get(key + "/rank", deadline);
  store.set(shared_key(meeting),
            fmt::format("ranks {} and {} use one device ({})", first.value_or("?"), meeting.rank,
                        meeting.device_identity));
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
  if (!meeting.device_identity.empty()) claim_device(store, meeting, deadline);
  // The last one to come opens the door for all, or says to all why it stays shut.
  store.set(here_key(meeting, meeting.rank), kOpen);
  const std::string door = meeting.name + "all";
  if (store.add(meeting.name + "count", 1) == meeting.world_size) {
    store.set(door, store.try_get(shared_key(meeting)).value_or(kOpen));
  }
  const auto answer = store.wait_get(door, deadline);
  if (!answer) refuse_missing(store, meeting);
  if (*answer != kOpen) {
    throw SharedDeviceError(fmt::format("{}: {}, and NCCL takes one rank on each. Hint: {}.",
                                        meeting.where, *answer, shared_device_hint(api)));
  }
  std::vector<ncclUniqueId> ids;
  for (int root = 0; root < roots; ++root) {
    const auto text = store.wait_get(id_key(root), deadline);
    if (!text) refuse_missing(store, meeting);
    ids.push_back(id_of(*text, meeting));
  }
  return ids;
}

std::string shared_device_hint(const NcclApi& api) {
  std::string hint = "give each rank its own device (torch.cuda.set_device(LOCAL_RANK))";
  if (api.version >= NcclApi::kSharedDeviceVersion) {
    hint += ", or set NCCL_MULTI_RANK_GPU_ENABLE=1 on all of them before the program starts";
  }
  return hint;
}

bool may_share_devices(const NcclApi& api) {
  // NCCL reads it as a number.
  return api.version >= NcclApi::kSharedDeviceVersion &&
         env_text("NCCL_MULTI_RANK_GPU_ENABLE").value_or("0") != "0";
}

}  // namespace libddp
