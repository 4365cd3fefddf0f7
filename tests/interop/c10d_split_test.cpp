// C10dBackend::split: what torch.distributed.split_group asks a backend for.

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

namespace {

c10::intrusive_ptr<c10d::Backend> split(C10dBackend& backend,
                                        const c10::intrusive_ptr<c10d::Store>& store,
                                        const std::vector<int>& ranks) {
  auto options = backend.getBackendOptions();
  options->group_name = "part " + std::to_string(ranks.front());
  options->timeout = 17s;
  return backend.split(store, ranks, options);
}

}  // namespace

TEST_CASE("a backend is split in the order of the ranks", "[c10d]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_backends(3, [&](C10dBackend& backend, int rank) {
    expect(backend.supportsSplitting(), "it can");
    const auto part = split(backend, store, {2, 0});
    expect((rank == 1) == (part == nullptr), "a rank outside gets none");
    if (part) {
      expect(part->getRank() == (rank == 2 ? 0 : 1) && part->getSize() == 2, "its rank and size");
      expect(part->getBackendOptions()->timeout == 17s, "the timeout is that of the options");
      const Group group = C10dBackend::group_of(part);
      expect(group->global_ranks() == std::vector<int>{2, 0}, "the ranks of the first group");
      Tensors tensors = {full_of({3}, rank)};
      part->allreduce(tensors)->wait();
      expect_equal(tensors[0], full_of({3}, 2), "the sum over the part");
      part->shutdown();
    }
    const auto alone = split(backend, store, {rank});
    Tensors tensors = {full_of({3}, 5)};
    alone->allreduce(tensors)->wait();
    expect_equal(tensors[0], full_of({3}, 5), "a part of one rank");
    alone->shutdown();
  });
}

TEST_CASE("a split with wrong ranks is refused", "[c10d]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_backends(2, [&](C10dBackend& backend, int) {
    for (const std::vector<int>& wrong : {std::vector<int>{0, 2}, {1, 1}, {-1}}) {
      bool is_refused = false;
      try {
        split(backend, store, wrong);
      } catch (const c10::Error&) {
        is_refused = true;
      }
      expect(is_refused, "ranks that the group does not have, or has once only");
    }
  });
}
