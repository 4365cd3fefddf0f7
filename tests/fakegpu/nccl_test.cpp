#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include "tests/fakegpu/with_ranks.h"
#include "tests/support/catch.h"

namespace fakegpu::test {
namespace {

using libddp::test::expect;

/// What a rank has: other values on each.
at::Tensor values(int rank, at::ScalarType dtype, std::int64_t count = 6) {
  return at::arange(count).add(1 + rank).to(dtype);
}

at::Tensor on(const Rank& rank, const at::Tensor& tensor) { return tensor.to(rank.device()); }

at::Tensor empty(const Rank& rank, std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return at::empty({count}, at::TensorOptions().device(rank.device()).dtype(dtype));
}

void expect_equal(const at::Tensor& result, const at::Tensor& expected, const std::string& what) {
  expect(at::equal(result.cpu(), expected), what);
}

void all_collectives(Rank& rank, int num_ranks) {
  const libddp::NcclApi& nccl = rank.nccl;
  at::Tensor all = at::zeros({6});
  std::vector<at::Tensor> parts;
  for (int other = 0; other < num_ranks; ++other) {
    parts.push_back(values(other, at::kFloat));
    all.add_(parts.back());
  }
  const at::Tensor mine = on(rank, values(rank.index, at::kFloat));
  const at::Tensor sum = empty(rank, 6);
  require(nccl.all_reduce(mine.data_ptr(), sum.data_ptr(), 6, ncclFloat, ncclSum, rank.comm,
                          rank.stream),
          "all_reduce");
  expect_equal(sum, all, "all_reduce");

  const at::Tensor root = at::zeros_like(mine);
  require(nccl.reduce(mine.data_ptr(), root.data_ptr(), 6, ncclFloat, ncclSum, 1, rank.comm,
                      rank.stream),
          "reduce");
  expect_equal(root, rank.index == 1 ? all : at::zeros({6}), "reduce");

  const at::Tensor shown = mine.clone();
  require(
      nccl.broadcast(shown.data_ptr(), shown.data_ptr(), 6, ncclFloat, 1, rank.comm, rank.stream),
      "broadcast");
  expect_equal(shown, parts[1], "broadcast in place");

  const at::Tensor gathered = empty(rank, 6 * num_ranks);
  const at::Tensor block = gathered.narrow(0, 6 * rank.index, 6);
  block.copy_(mine);
  require(
      nccl.all_gather(block.data_ptr(), gathered.data_ptr(), 6, ncclFloat, rank.comm, rank.stream),
      "all_gather");
  expect_equal(gathered, at::cat(parts), "all_gather in place");

  const at::Tensor scattered = gathered.narrow(0, 6 * rank.index, 6);
  require(nccl.reduce_scatter(gathered.data_ptr(), scattered.data_ptr(), 6, ncclFloat, ncclSum,
                              rank.comm, rank.stream),
          "reduce_scatter");
  expect_equal(scattered, parts[static_cast<std::size_t>(rank.index)] * num_ranks,
               "reduce_scatter in place");
}

TEST_CASE_METHOD(WithNccl, "collectives between threads give what ATen gives") {
  for (const int num_ranks : {2, 3, 4})
    run_threads(num_ranks, [&](Rank& rank) { all_collectives(rank, num_ranks); });
  REQUIRE(race_texts() == std::vector<std::string>{});
  REQUIRE(mock_nccl::live().communicators == 0);
  REQUIRE(mock_nccl::calls("all_gather") == 9);
  REQUIRE(mock_nccl::calls("all_gather", 3) == 1);
}

TEST_CASE_METHOD(WithNccl, "collectives between processes give what ATen gives") {
  for (const int num_ranks : {2, 4})
    run_processes(num_ranks, [&](Rank& rank) { all_collectives(rank, num_ranks); });
}

void reduce_all(Rank& rank, at::ScalarType dtype, ncclDataType_t type, ncclRedOp_t op,
                const at::Tensor& expected) {
  const at::Tensor x = on(rank, values(rank.index, dtype));
  require(rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), 6, type, op, rank.comm, rank.stream),
          "all_reduce");
  expect_equal(x, expected, std::string("reduction ") + at::toString(dtype));
}

TEST_CASE_METHOD(WithNccl, "reductions work in NCCL's datatypes") {
  const std::vector<std::pair<at::ScalarType, ncclDataType_t>> types = {
      {at::kFloat, ncclFloat},       {at::kDouble, ncclDouble}, {at::kHalf, ncclHalf},
      {at::kBFloat16, ncclBfloat16}, {at::kInt, ncclInt32},     {at::kLong, ncclInt64},
      {at::kByte, ncclUint8},        {at::kChar, ncclInt8}};
  run_threads(2, [&](Rank& rank) {
    for (const auto& [dtype, type] : types) {
      const at::Tensor a = values(0, dtype);
      const at::Tensor b = values(1, dtype);
      reduce_all(rank, dtype, type, ncclSum, a + b);
      reduce_all(rank, dtype, type, ncclProd, a * b);
      reduce_all(rank, dtype, type, ncclMax, at::max(a, b));
      reduce_all(rank, dtype, type, ncclMin, at::min(a, b));
      const at::Tensor mean = (a.to(at::kDouble) + b.to(at::kDouble)) / 2;
      reduce_all(rank, dtype, type, ncclAvg, mean.to(dtype));
    }
  });
}

TEST_CASE_METHOD(WithNccl, "PreMulSum multiplies with each rank's own factor") {
  run_threads(2, [](Rank& rank) {
    ncclRedOp_t op{};
    float factor = rank.index == 0 ? 2.0f : 10.0f;
    require(rank.nccl.red_op_create_pre_mul_sum(&op, &factor, ncclFloat, ncclScalarHostImmediate,
                                                rank.comm),
            "red_op_create_pre_mul_sum");
    reduce_all(rank, at::kFloat, ncclFloat, op,
               values(0, at::kFloat) * 2 + values(1, at::kFloat) * 10);
    require(rank.nccl.red_op_destroy(op, rank.comm), "red_op_destroy");
    const at::Tensor x = empty(rank, 1);
    const ncclResult_t result =
        rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), 1, ncclFloat, op, rank.comm, rank.stream);
    expect(result == ncclInvalidArgument, "a reduction that is gone");
  });
  REQUIRE(mock_nccl::live().reductions == 0);
}

TEST_CASE_METHOD(WithNccl, "messages in a group need no order, and meet in order") {
  run_threads(3, [](Rank& rank) {
    const int next = (rank.index + 1) % 3;
    const int before = (rank.index + 2) % 3;
    const at::Tensor first = at::full_like(empty(rank, 4), rank.index);
    const at::Tensor second = first + 10;
    const at::Tensor got_first = empty(rank, 4);
    const at::Tensor got_second = empty(rank, 4);
    require(rank.nccl.group_start(), "group_start");
    rank.nccl.recv(got_first.data_ptr(), 4, ncclFloat, before, rank.comm, rank.stream);
    rank.nccl.recv(got_second.data_ptr(), 4, ncclFloat, before, rank.comm, rank.stream);
    rank.nccl.send(first.data_ptr(), 4, ncclFloat, next, rank.comm, rank.stream);
    rank.nccl.send(second.data_ptr(), 4, ncclFloat, next, rank.comm, rank.stream);
    require(rank.nccl.group_end(), "group_end");
    expect_equal(got_first, at::full({4}, static_cast<float>(before)), "first message");
    expect_equal(got_second, at::full({4}, static_cast<float>(before + 10)), "second message");
  });
  REQUIRE(race_texts() == std::vector<std::string>{});
}

TEST_CASE_METHOD(WithNccl, "a send waits for its receive") {
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = at::full_like(empty(rank, 4), rank.index);
    if (rank.index == 0) {
      require(rank.nccl.send(x.data_ptr(), 4, ncclFloat, 1, rank.comm, rank.stream), "send");
      expect(rank.nccl.comm_destroy(rank.comm) == ncclSuccess, "destroy waits");
      return;
    }
    require(rank.nccl.recv(x.data_ptr(), 4, ncclFloat, 0, rank.comm, rank.stream), "recv");
    expect_equal(x, at::zeros({4}), "message");
  });
}

TEST_CASE_METHOD(WithNccl, "several collectives of a group are one operation") {
  run_threads(2, [](Rank& rank) {
    const at::Tensor a = at::ones_like(empty(rank, 4));
    const at::Tensor b = at::ones_like(empty(rank, 8));
    rank.nccl.group_start();
    rank.nccl.group_start();
    rank.nccl.all_reduce(a.data_ptr(), a.data_ptr(), 4, ncclFloat, ncclSum, rank.comm, rank.stream);
    rank.nccl.group_end();
    expect(default_stream(rank.index).query(), "nothing is issued before the outermost end");
    rank.nccl.all_reduce(b.data_ptr(), b.data_ptr(), 8, ncclFloat, ncclSum, rank.comm, rank.stream);
    require(rank.nccl.group_end(), "group_end");
    expect_equal(a, at::full({4}, 2.0f), "first");
    expect_equal(b, at::full({8}, 2.0f), "second");
  });
  const std::vector<mock_nccl::Issued> issued = mock_nccl::issued();
  REQUIRE(issued.size() == 4);
  REQUIRE(issued[0].operation == issued[1].operation);
  REQUIRE(issued[2].operation == issued[3].operation);
  REQUIRE(issued[0].operation != issued[2].operation);
  REQUIRE(issued[0].function == "all_reduce");
  REQUIRE(issued[0].count + issued[1].count == 12);
}

TEST_CASE_METHOD(WithNccl, "a communicator's operations run in the order of their calls") {
  run_threads(2, [](Rank& rank) {
    const c10::Stream side = new_stream(rank.index);
    const at::Tensor a = at::ones_like(empty(rank, 4));
    const at::Tensor b = at::ones_like(empty(rank, 4));
    rank.synchronize();
    Hold hold(default_stream(rank.index));
    rank.nccl.all_reduce(a.data_ptr(), a.data_ptr(), 4, ncclFloat, ncclSum, rank.comm, rank.stream);
    rank.nccl.all_reduce(b.data_ptr(), b.data_ptr(), 4, ncclFloat, ncclSum, rank.comm,
                         handle_of(side));
    expect(!side.query(), "the second waits for the first");
    hold.release();
    side.synchronize();
    expect(*static_cast<const float*>(a.data_ptr()) == 2, "the first is over");
  });
}

TEST_CASE_METHOD(WithNccl, "communicators do not wait for each other") {
  const ncclUniqueId other_id = new_id();
  run_threads(2, [&](Rank& rank) {
    ncclComm_t other = nullptr;
    ncclUniqueId id = other_id;
    require(rank.nccl.comm_init_rank_scalable(&other, 2, 1 - rank.index, 1, &id, nullptr), "init");
    const c10::Stream side = new_stream(rank.index);
    const at::Tensor a = at::ones_like(empty(rank, 4));
    const at::Tensor b = at::ones_like(empty(rank, 4));
    rank.synchronize();
    Hold hold(default_stream(rank.index));
    rank.nccl.all_reduce(a.data_ptr(), a.data_ptr(), 4, ncclFloat, ncclSum, rank.comm, rank.stream);
    rank.nccl.all_reduce(b.data_ptr(), b.data_ptr(), 4, ncclFloat, ncclSum, other, handle_of(side));
    side.synchronize();
    hold.release();
    require(rank.nccl.comm_destroy(other), "destroy");
  });
  REQUIRE(mock_nccl::live().communicators == 0);
}

TEST_CASE_METHOD(WithNccl, "the checker sees what operations read and write") {
  run_threads(2, [](Rank& rank) {
    const at::Tensor x = at::ones_like(empty(rank, 4));
    const c10::Stream side = new_stream(rank.index);
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(default_stream(rank.index));
    event.block(side);
    rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), 4, ncclFloat, ncclSum, rank.comm,
                         handle_of(side));
    side.synchronize();  // the host waits: what is launched from here on is ordered
    event.record(side);
    rank.nccl.all_reduce(x.data_ptr(), x.data_ptr(), 4, ncclFloat, ncclSum, rank.comm,
                         handle_of(side));
    if (rank.index == 0) x.add_(1);  // not ordered with the second
  });
  const std::vector<Race> found = races();
  REQUIRE(found.size() == 1);
  REQUIRE(found[0].first.name == "nccl all_reduce");
  REQUIRE(found[0].second.name == "aten::add.out");
}

TEST_CASE_METHOD(WithNccl, "memory and registrations are counted") {
  run_threads(1, [](Rank& rank) {
    void* data = nullptr;
    require(rank.nccl.mem_alloc(&data, 4096), "mem_alloc");
    void* handle = nullptr;
    require(rank.nccl.comm_register(rank.comm, data, 4096, &handle), "comm_register");
    const mock_nccl::Live live = mock_nccl::live();
    expect(live.memory == 1 && live.registrations == 1, "counts");
    require(rank.nccl.comm_deregister(rank.comm, handle), "comm_deregister");
    require(rank.nccl.mem_free(data), "mem_free");
    expect(rank.nccl.mem_free(data) == ncclInvalidArgument, "freed twice");
  });
  const mock_nccl::Live live = mock_nccl::live();
  REQUIRE(live.memory + live.registrations + live.communicators == 0);
}

}  // namespace
}  // namespace fakegpu::test
