// The collectives over ranks that are threads: worlds x memory x sizes, each against the value that
// every element must have.

#include "libddp/collectives/shm_comm.h"

#include <cstring>
#include <string>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {
namespace {

const std::size_t kCounts[] = {0, 1, 7, 100, 1000, 65537, 750001};
constexpr std::size_t kManyRanks = 5;

// Small whole numbers that repeat: sums over 16 ranks are exact in float32.
constexpr std::size_t kPeriod = 101;

float value(int rank, std::size_t i) { return static_cast<float>((i * 7 + rank * 13) % kPeriod); }

/// What the ranks' values add up to.
class Sums {
 public:
  explicit Sums(int world_size) {
    for (std::size_t i = 0; i < kPeriod; ++i) {
      for (int r = 0; r < world_size; ++r) sums_[i] += value(r, i);
    }
  }
  float operator()(std::size_t i) const { return sums_[i % kPeriod]; }

 private:
  float sums_[kPeriod] = {};
};

float* floats(const std::shared_ptr<std::byte>& block) {
  return reinterpret_cast<float*>(block.get());
}

struct Case {
  CommFixture& fixture;
  int rank;
  Memory memory;
  std::uint64_t sequence;
};

void fill(float* to, int rank, std::size_t from, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = value(rank, from + i);
}

void check_all_reduce(const Case& c, std::size_t count) {
  const auto block = c.fixture.allocate(c.rank, count * 4, c.memory);
  float* data = floats(block);
  fill(data, c.rank, 0, count);
  c.fixture.comm(c.rank).all_reduce(
      CommFixture::call(OpKind::AllReduce, c.sequence, Dtype::Float32, count), data, 0.5);
  const Sums sums(c.fixture.world_size());
  expect_all(data, count, "all_reduce", [&](std::size_t i) { return 0.5f * sums(i); });
}

void check_reduce_scatter(const Case& c, std::size_t count, bool in_place) {
  const int world_size = c.fixture.world_size();
  const auto input = c.fixture.allocate(c.rank, count * world_size * 4, c.memory);
  const auto own = c.fixture.allocate(c.rank, count * 4, c.memory);
  fill(floats(input), c.rank, 0, count * world_size);
  float* output = in_place ? floats(input) + c.rank * count : floats(own);
  c.fixture.comm(c.rank).reduce_scatter(
      CommFixture::call(OpKind::ReduceScatter, c.sequence, Dtype::Float32, count * world_size),
      input.get(), output, count);
  const Sums sums(world_size);
  expect_all(output, count, "reduce_scatter",
             [&](std::size_t i) { return sums(c.rank * count + i); });
}

void check_all_gather(const Case& c, std::size_t count, bool in_place) {
  const int world_size = c.fixture.world_size();
  const auto own = c.fixture.allocate(c.rank, count * 4, c.memory);
  const auto output = c.fixture.allocate(c.rank, count * world_size * 4, c.memory);
  float* input = in_place ? floats(output) + c.rank * count : floats(own);
  fill(input, c.rank, 0, count);
  c.fixture.comm(c.rank).all_gather(
      CommFixture::call(OpKind::AllGather, c.sequence, Dtype::Float32, count * world_size), input,
      output.get(), count * 4);
  // The input may change at once: nobody may still read it.
  if (!in_place && count > 0) std::memset(input, 0xFF, count * 4);
  for (int r = 0; r < world_size; ++r) {
    expect_all(floats(output) + r * count, count, "all_gather",
               [&](std::size_t i) { return value(r, i); });
  }
}

void check_all_to_all(const Case& c, std::size_t count) {
  const int world_size = c.fixture.world_size();
  const auto input = c.fixture.allocate(c.rank, count * world_size * 4, c.memory);
  const auto output = c.fixture.allocate(c.rank, count * world_size * 4, c.memory);
  fill(floats(input), c.rank, 0, count * world_size);
  fill(floats(output), c.rank, 1, count * world_size);
  const bool is_done = c.fixture.comm(c.rank).all_to_all(
      CommFixture::call(OpKind::AllToAll, c.sequence, Dtype::Float32, count * world_size),
      input.get(), output.get(), count * 4);
  expect(is_done, "all_to_all of equal blocks runs in shared memory");
  // The input may change at once: nobody may still read it.
  if (count > 0) std::memset(input.get(), 0xFF, count * world_size * 4);
  for (int r = 0; r < world_size; ++r) {
    // The own block is the caller's: it keeps what it was.
    const std::size_t from = r == c.rank ? 1 + r * count : c.rank * count;
    expect_all(floats(output) + r * count, count, "all_to_all",
               [&](std::size_t i) { return value(r, from + i); });
  }
}

void check_broadcast(const Case& c, std::size_t count, int root) {
  const auto block = c.fixture.allocate(c.rank, count * 4, c.memory);
  if (c.rank == root) fill(floats(block), root, 3, count);
  CommCall call = CommFixture::call(OpKind::Broadcast, c.sequence, Dtype::Float32, count);
  call.description.root = root;
  c.fixture.comm(c.rank).broadcast(call, block.get(), count * 4, root);
  expect_all(floats(block), count, "broadcast", [&](std::size_t i) { return value(root, 3 + i); });
  if (c.rank == root && count > 0) std::memset(block.get(), 0xFF, count * 4);
}

/// All collectives in a row without pauses, so that the buffers of one touch those of the next.
void check_all(CommFixture& fixture, int rank, Memory memory, std::uint64_t& sequence) {
  const int world_size = fixture.world_size();
  for (std::size_t count : kCounts) {
    const bool is_large = count > 70000;
    if (is_large && static_cast<std::size_t>(world_size) > kManyRanks) continue;
    const std::size_t block = is_large ? count / world_size : count;
    const auto next = [&] { return Case{fixture, rank, memory, ++sequence}; };
    check_all_reduce(next(), count);
    check_reduce_scatter(next(), block, false);
    check_all_gather(next(), block, true);
    check_broadcast(next(), count, world_size - 1);
    check_all_to_all(next(), block);
    check_reduce_scatter(next(), block, true);
    check_all_to_all(next(), block);
    check_all_reduce(next(), count);
    check_all_gather(next(), block, false);
    check_broadcast(next(), count, 0);
    fixture.comm(rank).barrier(CommFixture::call(OpKind::Barrier, ++sequence));
  }
}

void check_world(int world_size, const char* cpu_mask) {
  CommFixture fixture(world_size, cpu_mask);
  run_ranks(world_size, [&](int rank) {
    std::uint64_t sequence = 0;
    for (Memory memory : {Memory::Arena, Memory::Ordinary, Memory::Mixed}) {
      check_all(fixture, rank, memory, sequence);
    }
  });
}

TEST_CASE("collectives with a core for every rank") {
  for (int world_size : {1, 2, 3, 5, 8}) check_world(world_size, CommFixture::kFreeCores);
}

TEST_CASE("collectives with more ranks than cores") {
  for (int world_size : {2, 3, 16}) check_world(world_size, CommFixture::kOneCore);
}

// 3 million floats: several staging chunks of the oversubscribed policy too.
TEST_CASE("collectives of several megabytes") {
  constexpr std::size_t kCount = 3000001;
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    CommFixture fixture(3, mask);
    run_ranks(3, [&](int rank) {
      std::uint64_t sequence = 0;
      for (Memory memory : {Memory::Arena, Memory::Ordinary, Memory::Mixed}) {
        check_all_reduce({fixture, rank, memory, ++sequence}, kCount);
        check_reduce_scatter({fixture, rank, memory, ++sequence}, kCount / 2, false);
        check_all_gather({fixture, rank, memory, ++sequence}, kCount / 2, false);
        check_broadcast({fixture, rank, memory, ++sequence}, kCount, 1);
      }
    });
  }
}

TEST_CASE("many small calls in a row keep their slots apart") {
  for (const char* mask : {CommFixture::kFreeCores, CommFixture::kOneCore}) {
    CommFixture fixture(3, mask);
    run_ranks(3, [&](int rank) {
      std::int64_t data[16];
      for (std::uint64_t sequence = 1; sequence <= 2000; ++sequence) {
        const std::size_t count = sequence % 2 == 0 ? 1 : 16;
        for (std::size_t i = 0; i < count; ++i)
          data[i] = static_cast<std::int64_t>(sequence) * rank;
        fixture.comm(rank).all_reduce(
            CommFixture::call(OpKind::AllReduce, sequence, Dtype::Int64, count), data);
        expect(data[count - 1] == static_cast<std::int64_t>(sequence) * 3, "small sum");
      }
    });
  }
}

TEST_CASE("average equals sum then division, on every rank") {
  CommFixture fixture(3);
  run_ranks(3, [&](int rank) {
    for (std::size_t count : {5u, 5000u}) {
      const auto block = fixture.allocate(rank, count * 4, Memory::Arena);
      fill(floats(block), rank, 0, count);
      fixture.comm(rank).all_reduce(
          CommFixture::call(OpKind::AllReduce, count, Dtype::Float32, count, ReduceOp::Avg),
          block.get());
      const Sums sums(3);
      expect_all(floats(block), count, "average", [&](std::size_t i) { return sums(i) / 3.0f; });
    }
  });
}

TEST_CASE("an operation that the type does not have is the caller's error") {
  CommFixture fixture(1);
  std::int32_t data = 1;
  const auto call = CommFixture::call(OpKind::AllReduce, 4, Dtype::Int32, 1, ReduceOp::Avg);
  const std::string message =
      message_of<ArgumentError>([&] { fixture.comm(0).all_reduce(call, &data); });
  REQUIRE(contains(message, "all_reduce #4 int32"));
  REQUIRE(contains(message, "AVG with scale 1 is not defined for int32"));
}

TEST_CASE("a communicator needs one member per rank") {
  ShmCommOptions options{.rank = 2, .world_size = 2, .group_name = "odd"};
  const std::string message = message_of<ArgumentError>([&] { ShmComm comm(std::move(options)); });
  REQUIRE(
      contains(message, "libddp[group odd]: cannot form a communicator of 2 ranks with 0 members"));
}

}  // namespace
}  // namespace libddp::test
