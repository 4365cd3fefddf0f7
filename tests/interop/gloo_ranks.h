#pragma once

// A Gloo backend per rank, ranks as threads over one store.
//
//   run_over_gloo(2, [&](ProcessGroup& group, int rank) { ... });

#include <chrono>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "libddp/interop/from_c10d.h"
#include "libddp/interop/gloo_engine.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {

/// torch records the operations of all Gloo groups of a process in one place, without a lock: ranks
/// that are threads would meet there. Read by torch at the first operation.
inline const bool kRecordsNothing = ::setenv("TORCH_FR_BUFFER_SIZE", "0", 1) == 0;

using GlooStore = c10::intrusive_ptr<c10d::Store>;

inline c10::intrusive_ptr<c10d::Backend> local_gloo(const GlooStore& store, int rank, int num_ranks,
                                                    std::chrono::milliseconds timeout) {
  return make_gloo(store, rank, num_ranks, "127.0.0.1", timeout);
}

/// Holds groups over Gloo until all ranks are back. One that destroys its end while another is
/// still in their last operation, a barrier too, now and then fails that one (pytorch/gloo#155).
class KeptGroups {
 public:
  Group keep(Group group) {
    const std::lock_guard lock(mutex_);
    groups_.push_back(group);
    return group;
  }

 private:
  std::mutex mutex_;
  std::vector<Group> groups_;
};

/// Runs `body` on `num_ranks` ranks of a fresh Gloo group that libddp has wrapped.
inline void run_over_gloo(int num_ranks, const std::function<void(ProcessGroup&, int)>& body,
                          std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  KeptGroups kept;
  run_ranks(num_ranks, [&](int rank) {
    const Group group =
        kept.keep(from_c10d(local_gloo(store, rank, num_ranks, timeout), {.name = "wrapped"}));
    body(*group, rank);
    group->shutdown();
  });
}

}  // namespace libddp::test
