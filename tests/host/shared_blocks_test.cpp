// Memory that all ranks of a host have in common: who may end when, and a rank that is interrupted.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "libddp/base/interrupt.h"
#include "libddp/memory/empty_cache.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

struct Interrupted {};

thread_local bool is_interrupted = false;

void interrupt_if_wanted() {
  if (is_interrupted) throw Interrupted();
}

/// Ctrl-C for the threads that set `is_interrupted`, for a scope.
class InterruptHere {
 public:
  InterruptHere() : before_(set_interrupt_hook(&interrupt_if_wanted)) {}
  ~InterruptHere() { set_interrupt_hook(before_); }

 private:
  InterruptHook before_;
};

bool holds(const at::Tensor& tensor, int value) { return tensor.eq(value).all().item<bool>(); }

/// Allocates while the queue is busy, and is interrupted in the wait for its turn.
void interrupt_allocation(ProcessGroup& group) {
  is_interrupted = true;
  bool was_interrupted = false;
  try {
    group.allocate_shared({1000}, at::kInt);
  } catch (const Interrupted&) {
    was_interrupted = true;
  }
  is_interrupted = false;
  expect(was_interrupted, "the wait was interrupted");
}

/// Lies where the interrupted call had its variables; false if somebody else has written here
/// before `end`.
bool stack_is_kept_until(const std::function<void()>& end) {
  constexpr std::uint64_t kMark = 0x5ca1ab1e5ca1ab1e;
  volatile std::uint64_t marks[4096];
  for (volatile std::uint64_t& mark : marks) mark = kMark;
  end();
  bool is_kept = true;
  for (volatile std::uint64_t& mark : marks) is_kept = is_kept && mark == kMark;
  return is_kept;
}

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

TEST_CASE("an interrupted allocation leaves nobody a piece of its stack", "[allocate_shared]") {
  const InterruptHere hook;
  std::atomic<bool> may_go_on{false};
  run_group(2, [&](ProcessGroup& group) {
    for (int owner = 0; owner < 2; ++owner) {
      at::Tensor sum = filled(1);
      if (group.rank() == 0) {
        may_go_on = false;
        group.send(filled(0), 1);
        const WorkPtr busy = group.all_reduce(sum, {}, {.async = true});
        interrupt_allocation(group);
        WorkPtr last;
        const bool is_kept = stack_is_kept_until([&] {
          last = group.barrier({.async = true});
          may_go_on = true;
          last->wait();
        });
        expect(is_kept, "nobody wrote into the caller's stack");
        expect(first(sum) == 2, "what ran before goes on");
      } else {
        group.recv(sum, 0);
        wait_until([&] { return may_go_on.load(); });
        group.all_reduce(sum.fill_(1));
        const at::Tensor shared = group.allocate_shared({1000}, at::kInt);
        shared.fill_(5);
        expect(holds(shared, 5), "memory of its own");
        group.barrier();
      }
    }
    // The block of which one rank knows nothing is free once the other lets go.
    const at::Tensor shared = group.allocate_shared({1000}, at::kInt);
    shared.fill_(6);
    group.barrier();
    expect(holds(shared, 6), "in common");
    group.barrier();
  });
}
