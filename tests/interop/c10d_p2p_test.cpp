// C10dBackend: send, recv, batches, barriers.

#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("send and recv pair by peer and tag", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors first = {full_of({3}, rank == 0 ? 7 : -1)};
    Tensors second = {full_of({2}, rank == 0 ? 8 : -1)};
    if (rank == 0) {
      auto a = backend.send(first, 1, 5);
      auto b = backend.send(second, 1, 6);
      a->wait();
      b->wait();
    } else {
      auto a = backend.recv(first, 0, 5);
      auto b = backend.recv(second, 0, 6);
      a->wait();
      b->wait();
      expect_equal(first[0], full_of({3}, 7), "tag 5");
      expect_equal(second[0], full_of({2}, 8), "tag 6");
    }
  });
}

TEST_CASE("recvAnysource tells whom it heard", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    Tensors tensor = {full_of({1}, rank)};
    if (rank != 0) {
      backend.send(tensor, 0, 0)->wait();
      return;
    }
    double heard = 0;
    for (int i = 0; i < 2; ++i) {
      auto work = backend.recvAnysource(tensor, 0);
      work->wait();
      expect(tensor[0].item<double>() == work->sourceRank(), "the source is the sender");
      heard += work->sourceRank();
    }
    expect(heard == 3, "both were heard");
  });
}

TEST_CASE("a batch may hold its parts in any order", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    const int peer = 1 - rank;
    Tensors out = {full_of({1000}, rank)};
    Tensors in = {full_of({1000}, -1)};
    backend.startCoalescing();
    // Both ranks receive first: one after the other this would never end.
    backend.recv(in, peer, 0);
    backend.send(out, peer, 0);
    backend.endCoalescing()->wait();
    expect_equal(in[0], full_of({1000}, peer), "exchanged");
  });
}

TEST_CASE("a batch holds collectives too", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int) {
    Tensors a = {full_of({2}, 1)};
    Tensors b = {full_of({2}, 2)};
    backend.startCoalescing();
    backend.allreduce(a, {});
    backend.allreduce(b, {});
    backend.endCoalescing()->wait();
    expect_equal(a[0], full_of({2}, 2), "first");
    expect_equal(b[0], full_of({2}, 4), "second");
  });
}

TEST_CASE("endCoalescing without a start is refused", "[c10d]") {
  run_backends(1, [](C10dBackend& backend, int) {
    expect(contains(message_of<c10::Error>([&] { backend.endCoalescing(); }), "no batch"), "text");
  });
}

TEST_CASE("an operation that nobody waited for is done after a barrier", "[c10d]") {
  run_backends(3, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({100}, rank)};
    auto work = backend.allreduce(tensors, {});
    backend.barrier({})->wait();
    expect(work->isCompleted() && work->isSuccess(), "done");
    expect_equal(tensors[0], full_of({100}, 3), "sum");
  });
}

TEST_CASE("many operations in flight end in order", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    std::vector<Tensors> tensors;
    std::vector<C10dBackend::WorkHandle> works;
    for (int i = 0; i < 200; ++i) {
      tensors.push_back({full_of({i + 1}, rank + i)});
      works.push_back(backend.allreduce(tensors.back(), {}));
    }
    works.back()->wait();
    for (int i = 0; i < 200; ++i) {
      works[i]->wait();
      expect_equal(tensors[i][0], full_of({i + 1}, 2 * i + 1), "sum");
    }
  });
}
