// Reducers on fake devices: the bits of the host, without races, with few launches, and without the
// host waiting for the device.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cuda/ddp_fixture.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Forward and backward without an update.
void pass(Reducer& reducer, const at::Tensor& loss) {
  reducer.prepare_for_backward({loss});
  loss.backward();
}

int issued_all_reduces(int rank) {
  int count = 0;
  for (const mock_nccl::Issued& issued : mock_nccl::issued()) {
    count += issued.rank == rank && issued.function == "all_reduce";
  }
  return count;
}

}  // namespace

TEST_CASE("steps on devices give the host's bits", "[ddp]") {
  const int world_size = GENERATE(1, 2, 3);
  const bool as_view = GENERATE(true, false);
  const bool to_none = GENERATE(true, false);
  expect_as_on_host(world_size, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    ReducerOptions options = small_buckets();
    options.gradient_as_bucket_view = as_view;
    const auto reducer = Reducer::create(net.parameters(), group, options);
    expect(reducer->num_buckets() > 2, "several buckets");
    for (int i = 0; i < 4; ++i) {
      net.clear(to_none);
      step(*reducer, net, batch(group->rank(), i, device));
    }
    return net.values();
  });
}

TEST_CASE("one launch fills a bucket, and none where gradients stand there already", "[ddp]") {
  const CountedCalls copies("aten::_foreach_copy_");
  for (const bool to_none : {true, false}) {
    run_device_group(2, [&](ProcessGroup& group, c10::Device device) {
      TrainedNet net(device);
      const auto reducer =
          Reducer::create(net.parameters(), group.shared_from_this(), small_buckets());
      for (int i = 0; i < 2; ++i) {
        net.clear(to_none);
        step(*reducer, net, batch(group.rank(), i, device));
      }
      net.clear(to_none);
      group.barrier();
      const at::Tensor input = batch(group.rank(), 2, device);
      const int copies_before = copies.count();
      group.barrier();
      const int reduces_before = issued_all_reduces(group.rank());
      const auto waits_before = fakegpu::num_host_waits(device.index());
      step(*reducer, net, input);
      const auto waits = fakegpu::num_host_waits(device.index()) - waits_before;
      const int num_reduces = issued_all_reduces(group.rank()) - reduces_before;
      group.barrier();
      const int num_buckets = static_cast<int>(reducer->num_buckets());
      expect(copies.count() - copies_before == (to_none ? 2 * num_buckets : 0),
             fmt::format("{} copies", copies.count() - copies_before));
      expect(num_reduces == num_buckets, fmt::format("{} all_reduces", num_reduces));
      expect(waits == 0, fmt::format("{} waits of the host", waits));
      // Each rank looks before the other goes on.
      group.barrier();
    });
  }
  REQUIRE(races_text() == "");
}

TEST_CASE("a lone rank's gradients stay where they are", "[ddp]") {
  const CountedCalls copies("aten::_foreach_copy_");
  run_device_group(1, [&](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer =
        Reducer::create(net.parameters(), group.shared_from_this(), small_buckets());
    for (int i = 0; i < 3; ++i) {
      net.clear();
      const at::Tensor input = batch(0, i, device);
      const auto before = fakegpu::num_operations(device.index());
      const at::Tensor bare = net.loss(input);
      bare.backward();
      const auto bare_operations = fakegpu::num_operations(device.index()) - before;
      net.clear();
      const auto middle = fakegpu::num_operations(device.index());
      const auto waits = fakegpu::num_host_waits(device.index());
      pass(*reducer, net.loss(input));
      expect(fakegpu::num_host_waits(device.index()) == waits, "no waits");
      expect(fakegpu::num_operations(device.index()) - middle == bare_operations,
             "nothing is added");
      net.update();
    }
  });
  REQUIRE(copies.count() == 0);
  REQUIRE(mock_nccl::issued().empty());
}

TEST_CASE("passes that only accumulate, and one that averages", "[ddp]") {
  const bool as_view = GENERATE(true, false);
  expect_as_on_host(2, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    ReducerOptions options = small_buckets();
    options.gradient_as_bucket_view = as_view;
    const auto reducer = Reducer::create(net.parameters(), group, options);
    for (int i = 0; i < 6; ++i) {
      if (i % 3 == 0) net.clear();
      const at::Tensor loss = net.loss(batch(group->rank(), i, device));
      if (i % 3 == 2) {
        pass(*reducer, loss);
        net.update();
      } else {
        loss.backward();
      }
    }
    return net.values();
  });
}

TEST_CASE("the graph may be kept, and gradients may have graphs", "[ddp]") {
  expect_as_on_host(2, [](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer = Reducer::create(net.parameters(), group, small_buckets());
    at::Tensor loss = net.loss(batch(group->rank(), 0, device));
    reducer->prepare_for_backward({loss});
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    std::vector<at::Tensor> found = net.gradients();
    net.clear();
    loss = net.loss(batch(group->rank(), 1, device));
    reducer->prepare_for_backward({loss});
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    for (at::Tensor& gradient : net.gradients()) found.push_back(gradient);
    net.clear();
    return found;
  });
}

TEST_CASE("parameters that some ranks or all do not use", "[ddp]") {
  expect_as_on_host(3, [](const Group& group, c10::Device device) {
    TrainedNet net(device);
    ReducerOptions options = small_buckets();
    options.find_unused_parameters = true;
    const auto reducer = Reducer::create(net.parameters(), group, options);
    std::vector<at::Tensor> found;
    for (int i = 0; i < 4; ++i) {
      if (i != 2) net.clear();  // else what was left of the pass before counts
      const int num_layers = i == 3 ? 2 : 1 + group->rank();
      pass(*reducer, net.loss(batch(group->rank(), i, device), num_layers));
      for (const at::Tensor& gradient : net.gradients()) found.push_back(gradient);
    }
    return found;
  });
}

TEST_CASE("who lacks a gradient is told at once, the others before their next pass", "[ddp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer =
        Reducer::create(net.parameters(), group.shared_from_this(), small_buckets());
    for (int i = 0; i < 2; ++i) {
      net.clear();
      step(*reducer, net, batch(group.rank(), i, device));
    }
    net.clear();
    const at::Tensor loss = net.loss(batch(group.rank(), 2, device), group.rank() == 1 ? 2 : 3);
    reducer->prepare_for_backward({loss});
    std::string message;
    if (group.rank() == 1) {
      message = message_of<StateError>([&] { loss.backward(); });
    } else {
      loss.backward();
      // The group serves others meanwhile.
      group.barrier();
      message = message_of<StateError>([&] { reducer->prepare_for_backward({loss}); });
    }
    if (group.rank() == 1) group.barrier();
    expect(message.find("2 of 6 parameters got no gradient: '2.weight' (rank 1), '2.bias' (rank "
                        "1)") != std::string::npos,
           message);
    net.clear();
    step(*reducer, net, batch(group.rank(), 3, device));
    expect(net.gradients()[4].defined(), "goes on");
  });
  REQUIRE(races_text() == "");
}

TEST_CASE("all learn of a missing gradient in the first pass", "[ddp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer =
        Reducer::create(net.parameters(), group.shared_from_this(), small_buckets());
    const at::Tensor loss = net.loss(batch(group.rank(), 0, device), group.rank() == 1 ? 2 : 3);
    reducer->prepare_for_backward({loss});
    const std::string message = message_of<StateError>([&] { loss.backward(); });
    expect(message.find("'2.weight' (rank 1)") != std::string::npos, message);
  });
}

TEST_CASE("a static graph, and a rank without data", "[ddp]") {
  expect_as_on_host(2, [](const Group& group, c10::Device device) {
    TrainedNet net(device);
    ReducerOptions options = small_buckets();
    options.static_graph = true;
    const auto reducer = Reducer::create(net.parameters(), group, options);
    for (int i = 0; i < 4; ++i) {
      net.clear();
      if (i == 2 && group->rank() == 1) {
        reducer->run_empty_pass();
        net.update();
      } else {
        // A layer used twice fires twice.
        const at::Tensor hidden = net.layer(1, net.layer(1, net.layer(0, batch(0, i, device))));
        pass(*reducer, hidden.pow(2).sum());
        net.update();
      }
    }
    return net.values();
  });
}

TEST_CASE("blocks for optimizers that share the work", "[ddp]") {
  const bool averages = GENERATE(false, true);
  expect_as_on_host(2, [&](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer = Reducer::create(net.parameters(), group, small_buckets());
    reducer->shard(averages);
    std::vector<at::Tensor> found;
    for (int i = 0; i < 4; ++i) {
      if (i != 3) net.clear();
      pass(*reducer, net.loss(batch(group->rank(), i, device)));
      for (std::size_t bucket = 0; bucket < reducer->num_buckets(); ++bucket) {
        found.push_back(reducer->buckets().block(bucket, group->rank()).cpu().clone());
      }
    }
    return found;
  });
}

TEST_CASE("parameters that two reducers have in common", "[ddp]") {
  expect_as_on_host(2, [](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const NamedTensors& all = net.parameters();
    const auto first = Reducer::create({all[0], all[1], all[2], all[3]}, group, small_buckets());
    const auto second = Reducer::create({all[2], all[3], all[4], all[5]}, group, small_buckets());
    std::vector<at::Tensor> found;
    for (int i = 0; i < 4; ++i) {
      if (i != 2) net.clear();
      const at::Tensor input = batch(group->rank(), i, device);
      pass(*first, net.loss(input, 2));
      const at::Tensor wide = at::cat({input, input.narrow(1, 0, 1)}, 1);
      pass(*second, net.layer(2, net.layer(1, wide)).pow(2).sum());
      for (const at::Tensor& gradient : net.gradients()) found.push_back(gradient);
      net.update();
    }
    return found;
  });
}

TEST_CASE("passes that the caller ends, and averages with a scale", "[ddp]") {
  expect_as_on_host(2, [](const Group& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer = Reducer::create(net.parameters(), group, small_buckets());
    reducer->set_gradient_scale(0.5);
    reducer->set_manual_finalization(true);
    for (int i = 0; i < 3; ++i) {
      net.clear();
      pass(*reducer, net.loss(batch(group->rank(), i, device)));
      reducer->finalize_backward_manual();
      net.update();
    }
    return net.values();
  });
}

TEST_CASE("buckets without a used parameter are not sent", "[ddp]") {
  expect_as_on_host(2, [](const Group& group, c10::Device device) {
    TrainedNet net(device);
    ReducerOptions options = small_buckets();
    options.find_unused_parameters = true;
    options.skip_unused_buckets = true;
    const auto reducer = Reducer::create(net.parameters(), group, options);
    for (int i = 0; i < 4; ++i) {
      net.clear();
      step(*reducer, net, batch(group->rank(), i, device), i % 2 == 0 ? 3 : 2);
    }
    return net.values();
  });
}

TEST_CASE("an exception in backward ends the pass on all ranks", "[ddp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    TrainedNet net(device);
    const auto reducer =
        Reducer::create(net.parameters(), group.shared_from_this(), small_buckets());
    step(*reducer, net, batch(group.rank(), 0, device));
    net.clear();
    const at::Tensor hidden = net.layer(0, batch(group.rank(), 1, device));
    hidden.register_hook([&](const at::Tensor& gradient) {
      if (group.rank() == 1) throw std::runtime_error("a hook of the script");
      return gradient;
    });
    const at::Tensor loss = net.layer(2, net.layer(1, hidden)).pow(2).sum();
    reducer->prepare_for_backward({loss});
    if (group.rank() == 1) {
      message_of<std::exception>([&] { loss.backward(); });
      return;  // leaves the group, which ends the other's wait
    }
    try {
      loss.backward();
      // What was launched is found out when it is looked at.
      for (int i = 0; i < 10; ++i) group.barrier();
      expect(false, "an error");
    } catch (const PeerError&) {
    }
  });
}
