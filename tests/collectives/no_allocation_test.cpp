// The hot path allocates nothing: this program counts what each thread takes from the heap.

#include <cstdlib>
#include <new>

#include "libddp/collectives/shm_comm.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace {

thread_local long num_allocations = 0;

}  // namespace

// noinline: g++ would otherwise pair an inlined malloc with a delete that it does not see through.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ++num_allocations;
  if (void* block = std::malloc(bytes == 0 ? 1 : bytes)) return block;
  throw std::bad_alloc();
}
// Also the form that std::stable_sort uses: a sanitizer's own would not go with our delete.
__attribute__((noinline)) void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++num_allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
__attribute__((noinline)) void operator delete(void* block) noexcept { std::free(block); }
__attribute__((noinline)) void operator delete(void* block, std::size_t) noexcept {
  std::free(block);
}

namespace libddp::test {
namespace {

void run_all(CommFixture& fixture, int rank, std::byte* a, std::byte* b, std::uint64_t bytes) {
  ShmComm& comm = fixture.comm(rank);
  const std::uint64_t count = bytes / 4;
  comm.all_reduce(CommFixture::call(OpKind::AllReduce, 1, Dtype::Float32, count), a);
  comm.reduce_scatter(CommFixture::call(OpKind::ReduceScatter, 2, Dtype::Float32, count), a, b,
                      count / 2);
  comm.all_gather(CommFixture::call(OpKind::AllGather, 3, Dtype::Float32, count), b, a, bytes / 2);
  CommCall broadcast = CommFixture::call(OpKind::Broadcast, 4, Dtype::Float32, count);
  broadcast.description.root = 0;
  comm.broadcast(broadcast, a, bytes, 0);
  comm.barrier(CommFixture::call(OpKind::Barrier, 5));
}

TEST_CASE("collectives take nothing from the heap") {
  for (Memory memory : {Memory::Arena, Memory::Ordinary, Memory::Mixed}) {
    CommFixture fixture(2);
    run_ranks(2, [&](int rank) {
      for (std::uint64_t bytes : {8u, 2048u, 65536u, 4u << 20}) {
        const auto a = fixture.allocate(rank, bytes, memory);
        const auto b = fixture.allocate(rank, bytes, memory);
        run_all(fixture, rank, a.get(), b.get(), bytes);  // the first call chooses the kernels
        const long before = num_allocations;
        for (int i = 0; i < 20; ++i) run_all(fixture, rank, a.get(), b.get(), bytes);
        const long taken = num_allocations - before;
        expect(taken == 0, std::to_string(taken) + " allocations at " + std::to_string(bytes));
      }
    });
  }
}

TEST_CASE("the counter counts") {
  const long before = num_allocations;
  ::operator delete(::operator new(8));
  const long taken = num_allocations - before;
  REQUIRE(taken == 1);
}

}  // namespace
}  // namespace libddp::test
