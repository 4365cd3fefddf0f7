#pragma once

// A C10dBackend per rank, ranks as threads over one store.
//
//   run_backends(2, [&](C10dBackend& backend, int rank) { ... });

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "libddp/interop/c10d_backend.h"
#include "libddp/interop/c10d_checks.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {

using BackendBody = std::function<void(C10dBackend&, int)>;

/// Runs `body` on `num_ranks` ranks of a fresh group and leaves it in order.
inline void run_backends(int num_ranks, const BackendBody& body,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(num_ranks, [&](int rank) {
    ProcessGroup::Options options;
    options.rank = rank;
    options.world_size = num_ranks;
    options.timeout = timeout;
    auto backend = C10dBackend::create(store, options);
    body(*backend, rank);
    backend->shutdown();
  });
}

}  // namespace libddp::test
