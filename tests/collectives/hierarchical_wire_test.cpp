// LIBDDP_WIRE_DTYPE=bfloat16: accuracy, equal bits, and what stays exact.

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/hosts_fixture.h"

using namespace libddp;
using libddp::test::CommFixture;
using libddp::test::expect;
using libddp::test::HostsRank;
using libddp::test::run_hosts;

namespace {

CommCall wire_call(OpKind kind, std::uint64_t sequence, std::size_t count,
                   ReduceOp op = ReduceOp::Sum) {
  return CommFixture::call(kind, sequence, Dtype::Float32, count, op);
}

// The sum of all ranks' floats of one seed, and of their magnitudes, at one place.
struct RoughSum {
  double sum = 0;
  double magnitude = 0;
};

std::vector<float> seeded_floats(int rank, std::size_t count) {
  std::minstd_rand random(static_cast<unsigned>(rank) + 77);
  std::normal_distribution<float> normal;
  std::vector<float> floats(count);
  for (float& value : floats) value = normal(random);
  return floats;
}

std::vector<RoughSum> rough_sums(int world_size, std::size_t count) {
  std::vector<RoughSum> sums(count);
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<float> floats = seeded_floats(rank, count);
    for (std::size_t i = 0; i < count; ++i) {
      sums[i].sum += floats[i];
      sums[i].magnitude += std::abs(floats[i]);
    }
  }
  return sums;
}

// Each host's sum is rounded to 8 bits before it leaves, at most 1/256 off, the result once more.
bool is_near(float value, const RoughSum& wanted) {
  return std::abs(value - wanted.sum) <= wanted.magnitude / 128;
}

void check_narrow_all_reduce(HostsRank& me, std::size_t count) {
  const std::vector<RoughSum> wanted = rough_sums(me.world_size, count);
  std::vector<float> mine = seeded_floats(me.rank, count);
  me.comm->all_reduce(wire_call(OpKind::AllReduce, 1, count), mine.data(), 1.0);
  std::size_t num_near = 0;
  std::size_t num_rounded = 0;
  for (std::size_t i = 0; i < count; ++i) {
    num_near += is_near(mine[i], wanted[i]);
    num_rounded += (std::bit_cast<std::uint32_t>(mine[i]) & 0xFFFF) == 0;
  }
  expect(num_near == count, "every sum within the tolerance");
  expect(num_rounded == count, "every sum is a bf16");
  std::vector<float> all(count * static_cast<std::size_t>(me.world_size));
  me.comm->all_gather(wire_call(OpKind::AllGather, 2, all.size()), mine.data(), all.data(),
                      count * sizeof(float));
  for (int rank = 0; rank < me.world_size; ++rank) {
    const float* theirs = all.data() + static_cast<std::size_t>(rank) * count;
    expect(std::memcmp(theirs, mine.data(), count * sizeof(float)) == 0, "one sum on all ranks");
  }
}

void check_narrow_scatter(HostsRank& me, std::size_t count) {
  const std::size_t total = count * static_cast<std::size_t>(me.world_size);
  const std::vector<RoughSum> wanted = rough_sums(me.world_size, total);
  const std::vector<float> mine = seeded_floats(me.rank, total);
  std::vector<float> block(count);
  me.comm->reduce_scatter(wire_call(OpKind::ReduceScatter, 3, total), mine.data(), block.data(),
                          count, 1.0);
  const RoughSum* own = wanted.data() + static_cast<std::size_t>(me.rank) * count;
  std::size_t num_near = 0;
  for (std::size_t i = 0; i < count; ++i) num_near += is_near(block[i], own[i]);
  expect(num_near == count, "every sum of the own block within the tolerance");
}

// Small ones, other operations and other dtypes travel as they are.
void check_exact_all_reduces(HostsRank& me) {
  const float fine = 1.0f + 0x1p-20f;
  std::vector<float> floats(100000, fine);
  me.comm->all_reduce(wire_call(OpKind::AllReduce, 4, 100), floats.data(), 1.0);
  expect(floats[0] == static_cast<float>(me.world_size) * fine, "a small sum is exact");
  floats.assign(floats.size(), fine);
  me.comm->all_reduce(wire_call(OpKind::AllReduce, 5, floats.size(), ReduceOp::Max), floats.data(),
                      1.0);
  expect(floats[99999] == fine, "a maximum is exact");
  std::vector<double> doubles(100000, fine);
  me.comm->all_reduce(CommFixture::call(OpKind::AllReduce, 6, Dtype::Float64, doubles.size()),
                      doubles.data(), 1.0);
  expect(doubles[99999] == me.world_size * static_cast<double>(fine), "float64 is exact");
}

}  // namespace

TEST_CASE("Large float sums travel as bfloat16 between hosts, if asked to") {
  const std::vector<std::vector<int>> layouts{
      {0, 0, 1, 1}, {0, 1, 2}, {0, 1, 0, 0, 2}, {0, 0, 1, 1, 2, 2, 3, 3}};
  for (const std::vector<int>& layout : layouts) {
    for (const int num_sockets : {1, 3}) {
      const auto run = [](HostsRank& me) {
        check_narrow_all_reduce(me, 100003);
        check_narrow_scatter(me, 30011);
        check_exact_all_reduces(me);
      };
      run_hosts(layout, run, {.sockets_per_link = num_sockets, .wire_dtype = Dtype::BFloat16});
    }
  }
}
