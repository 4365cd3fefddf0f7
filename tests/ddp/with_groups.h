#pragma once

// Ranks as threads, each with a group over one in-memory store; autograd runs a CPU backward in the
// thread that calls it, so a thread is as good as a process here.
//
//   with_groups(2, [](Group group) { ... group->rank() ... });

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/group/process_group.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {

inline void with_groups(int world_size, const std::function<void(Group)>& f) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(world_size, [&](int rank) {
    ProcessGroup::Options options;
    options.rank = rank;
    options.world_size = world_size;
    options.timeout = std::chrono::seconds(60);
    const Group group = ProcessGroup::create(store, options);
    f(group);
    group->shutdown();
  });
}

}  // namespace libddp::test
