// Memory that all ranks of a host have in common: who may end when.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/memory/empty_cache.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

bool holds(const at::Tensor& tensor, int value) { return tensor.eq(value).all().item<bool>(); }

}  // namespace

TEST_CASE("what a peer holds stays when its owner leaves in order", "[allocate_shared]") {
  // More than an arena keeps of what is freed.
  const bool is_large = GENERATE(true, false);
  const std::int64_t bytes = is_large ? 300 * kMiB : 4 * kMiB;
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<at::Tensor> kept(2);
  at::Tensor others_arena;
  run_ranks(2, [&](int rank) {
    auto group = ProcessGroup::create(store, {.rank = rank, .world_size = 2, .name = "leave"});
    at::Tensor shared = group->allocate_shared({bytes}, at::kChar);
    if (rank == 0) shared.fill_(7);
    if (rank == 0) others_arena = group->allocate({8});
    group->barrier();
    if (rank == 1) kept[1] = shared;
    group->barrier();
    group->shutdown();
  });
  CHECK(holds(kept[1], 7));
  // Its arena is still there, for another tensor.
  empty_cache();
  CHECK(holds(kept[1], 7));
}
