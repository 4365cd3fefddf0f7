// Groups over several hosts (only names) whose collectives Gloo moves between hosts.

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "libddp/interop/inter_engine.h"
#include "tests/interop/gloo_ranks.h"
#include "tests/interop/stub_backend.h"
#include "tests/support/catch.h"
#include "tests/support/require_parts.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;
using namespace std::chrono_literals;

namespace {

using OnHosts = std::function<void(ProcessGroup&)>;

void run_with_engine(const std::vector<int>& host_of, const InterEngine& engine, const OnHosts& f,
                     std::chrono::milliseconds timeout = 60s) {
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  const int world_size = static_cast<int>(host_of.size());
  run_ranks(world_size, [&](int rank) {
    const int host = host_of[static_cast<std::size_t>(rank)];
    Group group = ProcessGroup::create(store, {.rank = rank,
                                               .world_size = world_size,
                                               .name = "inter",
                                               .timeout = timeout,
                                               .host_identity = "host " + std::to_string(host),
                                               .inter = engine});
    f(*group);
    group->shutdown();
  });
}

c10::intrusive_ptr<c10d::Backend> gloo_over(const InterEngineOptions& given) {
  return make_gloo(given.store, given.rank, given.world_size, given.address, given.timeout);
}

/// gloo_engine, counting the groups that it makes.
InterEngine counted_gloo(std::atomic<int>& num_made) {
  return inter_engine([&num_made](const InterEngineOptions& given) {
    ++num_made;
    return gloo_over(given);
  });
}

void check_large(ProcessGroup& group) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kShort, at::kBool}) {
    for (const std::int64_t numel : {3, 60001}) {
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Max}) {
        at::Tensor tensor = input_of(group.rank(), {numel}, dtype);
        group.all_reduce(tensor, {.op = op});
        expect_equal(tensor, reduced(group.size(), {numel}, dtype, op), "all_reduce");
      }
    }
  }
  at::Tensor mean = input_of(group.rank(), {60001}, at::kDouble);
  group.all_reduce(mean, {.op = ReduceOp::Avg, .scale = 2});
  const at::Tensor sum = reduced(group.size(), {60001}, at::kDouble, ReduceOp::Sum);
  expect(mean.allclose(sum.mul(2.0 / group.size())), "scaled average");
}

void check_moves(ProcessGroup& group, std::int64_t numel) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < group.size(); ++rank) {
    inputs.push_back(input_of(rank, {numel}, at::kFloat));
  }
  const at::Tensor own = inputs[static_cast<std::size_t>(group.rank())];
  const at::Tensor all = at::cat(inputs);
  at::Tensor gathered = at::zeros_like(all);
  group.all_gather_into(gathered, own);
  expect_equal(gathered, all, "all_gather_into");
  at::Tensor block = at::zeros_like(own);
  group.reduce_scatter_into(block, all);
  expect_equal(block, own.mul(group.size()), "reduce_scatter_into");
  for (int root = 0; root < group.size(); ++root) {
    at::Tensor sent = group.rank() == root ? own.clone() : at::zeros_like(own);
    group.broadcast(sent, root);
    expect_equal(sent, inputs[static_cast<std::size_t>(root)], "broadcast");
  }
}

}  // namespace

TEST_CASE("Gloo moves collectives between hosts", "[inter]") {
  const std::vector<int> hosts = GENERATE(std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1, 2},
                                          std::vector<int>{0, 0, 1}, std::vector<int>{0, 1, 0, 1});
  const int num_hosts = hosts.back() == 2 ? 3 : 2;
  const int leaders = hosts.size() == 4 ? 2 : 1;
  std::atomic<int> num_made{0};
  run_with_engine(hosts, counted_gloo(num_made), [](ProcessGroup& group) {
    check_large(group);
    for (const std::int64_t numel : {5, 40003}) check_moves(group, numel);
    group.barrier();
    expect(group.backend_name() == "hosts", "the backend's name");
  });
  REQUIRE(num_made == num_hosts * leaders);
}

TEST_CASE("parts of a group have its engine, and it may be made again", "[inter]") {
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> num_made{0};
  for (int time = 0; time < 2; ++time) {
    run_ranks(3, [&](int rank) {
      Group group = ProcessGroup::create(store, {.rank = rank,
                                                 .world_size = 3,
                                                 .timeout = 60s,
                                                 .host_identity = "host " + std::to_string(rank),
                                                 .inter = counted_gloo(num_made)});
      if (Group part = group->split({2, 0}, "part")) {
        at::Tensor tensor = at::full({20000}, rank);
        part->all_reduce(tensor);
        expect(tensor.eq(2).all().item<bool>(), "sum of the part");
        part->shutdown();
      }
      group->shutdown();
    });
    REQUIRE(num_made == (time + 1) * 5);
  }
}

TEST_CASE("an engine's own reduce-scatter is used where it has one", "[inter]") {
  const bool has_one = GENERATE(true, false);
  const std::vector<int> hosts = GENERATE(std::vector<int>{0, 1}, std::vector<int>{0, 0, 1});
  std::atomic<int> num_all_reduces{0};
  std::atomic<int> num_reduce_scatters{0};
  const InterEngine engine = inter_engine([&](const InterEngineOptions& given) {
    return c10::make_intrusive<CountingBackend>(gloo_over(given), has_one, num_all_reduces,
                                                num_reduce_scatters);
  });
  run_with_engine(hosts, engine, [](ProcessGroup& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kShort, at::kHalf}) {
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg}) {
        if (op == ReduceOp::Avg && dtype == at::kShort) continue;
        const std::int64_t numel = 40003;
        at::Tensor whole = input_of(group.rank(), {numel * group.size()}, dtype);
        at::Tensor block = at::zeros({numel}, dtype);
        group.reduce_scatter_into(block, whole, {.op = op});
        group.all_reduce(whole, {.op = op});
        expect_equal(block, whole.narrow(0, group.rank() * numel, numel), "as an all-reduce");
      }
    }
  });
  constexpr int kCalls = 8;
  const int num_leaders = 2;  // one per host
  REQUIRE(num_reduce_scatters == (has_one ? kCalls * num_leaders : 0));
  // Without one, the block of each of the two hosts is all-reduced.
  REQUIRE(num_all_reduces == kCalls * num_leaders * (has_one ? 1 : 3));
}

TEST_CASE("an engine without deadlines is given up", "[inter]") {
  std::vector<std::string> messages(2);
  run_with_engine({0, 1}, inter_engine([](const InterEngineOptions& given) {
                    return c10::make_intrusive<StuckBackend>(given.rank, given.world_size);
                  }),
                  [&](ProcessGroup& group) {
                    at::Tensor tensor = at::full({40000}, 1.0);
                    messages[static_cast<std::size_t>(group.rank())] = message_of<Error>([&] {
                      group.all_reduce(tensor, {}, {.timeout = std::chrono::milliseconds(500)});
                    });
                  });
  for (const std::string& message : messages) require_parts(message, {"all_reduce #1"});
  REQUIRE((contains(messages[0], "stuck: timed out, by libddp's clock") ||
           contains(messages[1], "stuck: timed out, by libddp's clock")));
}

TEST_CASE("a mismatch between hosts is named although Gloo moves the bytes", "[inter]") {
  std::vector<std::string> messages(2);
  run_with_engine({0, 1}, gloo_engine(), [&](ProcessGroup& group) {
    const std::int64_t numel = group.rank() == 0 ? 20000 : 30000;
    at::Tensor tensor = at::full({numel}, 1.0);
    messages[static_cast<std::size_t>(group.rank())] =
        message_of<PeerError>([&] { group.all_reduce(tensor); });
  });
  for (const std::string& message : messages) require_parts(message, {"[20000]", "[30000]"});
}

TEST_CASE("a rank that ends is named although Gloo moves the bytes", "[inter]") {
  const bool is_noticed_before = GENERATE(false, true);
  GlooStore store = c10::make_intrusive<c10d::HashStore>();
  std::string message;
  run_ranks(2, [&](int rank) {
    Group group = ProcessGroup::create(store, {.rank = rank,
                                               .world_size = 2,
                                               .timeout = 60s,
                                               .host_identity = "host " + std::to_string(rank),
                                               .inter = gloo_engine()});
    if (rank == 1) return;  // drops its group
    for (int i = 0; is_noticed_before && !group->failure() && i < 1000; ++i) {
      std::this_thread::sleep_for(10ms);
    }
    at::Tensor tensor = at::full({40000}, 1.0);
    message = message_of<PeerError>([&] { group->all_reduce(tensor); });
  });
  require_parts(message, {"all_reduce", "rank 1"});
}

TEST_CASE("an engine that does not fit is refused", "[inter]") {
  const auto create = [](const InterBackendMaker& make) {
    std::vector<std::string> messages(2);
    GlooStore store = c10::make_intrusive<c10d::HashStore>();
    run_ranks(2, [&](int rank) {
      messages[static_cast<std::size_t>(rank)] = message_of<ArgumentError>([&] {
        ProcessGroup::create(store, {.rank = rank,
                                     .world_size = 2,
                                     .timeout = 20s,
                                     .host_identity = "host " + std::to_string(rank),
                                     .inter = inter_engine(make)});
      });
    });
    return messages;
  };
  for (const std::string& message : create([](const InterEngineOptions&) { return nullptr; })) {
    require_parts(message, {"inter", "gave nothing", "one rank per host"});
  }
  GlooStore other = c10::make_intrusive<c10d::HashStore>();
  const auto turned = [&](const InterEngineOptions& given) {
    return local_gloo(other, 1 - given.rank, 2, 20s);
  };
  require_parts(create(turned)[0], {"has rank 1 of 2", "host 0 of 2"});
}
