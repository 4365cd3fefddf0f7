// Precisions, strategies and ways of training of sharded models on devices, against the host.

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/module/grad_norm.h"
#include "tests/cuda/device_fixture.h"
#include "tests/cuda/sharded_net.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

Training with_options(std::function<void(ShardOptions&)> change) {
  Training training;
  training.options = [change = std::move(change)](ProcessGroup& group) {
    ShardOptions options{.shard = group.shared_from_this()};
    change(options);
    return options;
  };
  return training;
}

/// Shards and gradients in the host's memory: the same bits.
void require_offloaded_bits(int world_size, const std::function<void(ShardOptions&)>& change,
                            Training training = {}) {
  training.options = with_options(change).options;
  const Results wanted = on_host(world_size, training);
  training.options = [change](ProcessGroup& group) {
    ShardOptions options{.shard = group.shared_from_this(),
                         .compute_device = fakegpu::device_at(group.rank())};
    change(options);
    return options;
  };
  const Results found = on_devices(world_size, training);
  REQUIRE(races_text() == "");
  require_same(found, wanted);
}

/// Two ranks own a block each, and two more the same.
void shard_and_replicate(ShardOptions& options) {
  const Group all = options.shard;
  const int rank = all->rank();
  for (int i = 0; i < 2; ++i) {
    const Group shard = all->split({2 * i, 2 * i + 1}, "shard");
    const Group replicate = all->split({i, i + 2}, "replicate");
    if (rank / 2 == i) options.shard = shard;
    if (rank % 2 == i) options.replicate = replicate;
  }
}

void run_pass(ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
  mean_square(net.forward(batch_at(group.rank(), step).to(device))).backward();
}

/// Runs `compute` in another stream, as a script does it.
at::Tensor in_side_stream(c10::Device device, const at::Tensor& input,
                          const std::function<at::Tensor()>& compute) {
  if (device.is_cpu()) return compute();
  const c10::Stream main = fakegpu::current_stream(device.index());
  const c10::Stream side = side_stream(device);
  c10::Event begin(device.type());
  begin.record(main);
  begin.block(side);
  at::Tensor output;
  {
    const c10::StreamGuard guard(side);
    output = compute();
  }
  if (input.defined()) input.record_stream(side);
  output.record_stream(main);
  c10::Event end(device.type());
  end.record(side);
  end.block(main);
  return output;
}

}  // namespace

TEST_CASE("lower precisions on devices", "[fsdp]") {
  const auto world_size = GENERATE(1, 2);
  require_host_bits(
      world_size, with_options([](ShardOptions& options) { options.param_dtype = at::kBFloat16; }));
  require_host_bits(world_size, with_options([](ShardOptions& options) {
                      options.param_dtype = at::kBFloat16;
                      options.reduce_dtype = at::kFloat;
                    }));
  require_host_bits(world_size, with_options([](ShardOptions& options) {
                      options.param_dtype = at::kBFloat16;
                      options.keep_low_gradients = true;
                    }));
  require_host_bits(world_size, with_options([](ShardOptions& options) {
                      options.reduce_dtype = at::kBFloat16;
                    }));
}

TEST_CASE("replicas without sharding, and of shards, on devices", "[fsdp]") {
  require_host_bits(2, with_options([](ShardOptions& options) {
                      options.replicate = std::exchange(options.shard, nullptr);
                    }));
  require_host_bits(2, with_options([](ShardOptions& options) {
                      options.replicate = std::exchange(options.shard, nullptr);
                      options.param_dtype = at::kBFloat16;
                    }));
  require_host_bits(4, with_options(shard_and_replicate));
}

TEST_CASE("offloaded parameters on devices", "[fsdp]") {
  const auto world_size = GENERATE(1, 2);
  require_offloaded_bits(world_size, [](ShardOptions&) {});
  require_offloaded_bits(world_size, [](ShardOptions& options) { options.pin_memory = false; });
  require_offloaded_bits(world_size, [](ShardOptions& options) {
    options.param_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
  });
  require_offloaded_bits(world_size, [](ShardOptions& options) {
    options.param_dtype = at::kBFloat16;
    options.keep_low_gradients = true;
  });
}

TEST_CASE("offloaded parameters with replicas on devices", "[fsdp]") {
  require_offloaded_bits(4, shard_and_replicate);
  require_offloaded_bits(4, [](ShardOptions& options) {
    shard_and_replicate(options);
    options.param_dtype = at::kBFloat16;
    options.reduce_dtype = at::kFloat;
  });
  require_offloaded_bits(
      2, [](ShardOptions& options) { options.replicate = std::exchange(options.shard, nullptr); });
}

TEST_CASE("offloaded parameters in passes of all kinds on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    const int rank = group.rank();
    net.uses_bias = [=](int layer) { return layer > 0 || (rank == 0 && step == 0); };
    {
      const c10::NoGradGuard no_grad;
      net.forward(batch_at(rank, step + 9).to(device));
    }
    net.model().set_sync(false);
    run_pass(net, group, device, 3 * step);
    net.model().set_sync(true);
    run_pass(net, group, device, 3 * step + 1);
    run_pass(net, group, device, 3 * step + 2);
  };
  require_offloaded_bits(
      2, [](ShardOptions&) {}, training);
  training.num_steps = 2;
  require_offloaded_bits(4, shard_and_replicate, training);
}

TEST_CASE("passes without synchronisation, and gradients that are there, on devices", "[fsdp]") {
  const auto shards = GENERATE(true, false);
  Training training = with_options([=](ShardOptions& options) {
    if (!shards) options.replicate = std::exchange(options.shard, nullptr);
  });
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    net.model().set_sync(false);
    run_pass(net, group, device, 3 * step);
    net.model().set_sync(true);
    run_pass(net, group, device, 3 * step + 1);
    run_pass(net, group, device, 3 * step + 2);
  };
  require_host_bits(2, training);
}

TEST_CASE("an evaluation between steps on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    {
      const c10::NoGradGuard no_grad;
      net.forward(batch_at(group.rank(), step + 9).to(device));
    }
    run_pass(net, group, device, step);
  };
  require_host_bits(2, training);
}

TEST_CASE("frozen parameters, and divisors, on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    for (const auto& unit : net.model().units()) unit->divide_gradients_by(4.0);
    net.parameters()[static_cast<std::size_t>(step) + 1].set_requires_grad(false);
    run_pass(net, group, device, step);
  };
  require_host_bits(2, training);
}

TEST_CASE("a parameter that some ranks, or none, have used, on devices", "[fsdp]") {
  const auto shards = GENERATE(true, false);
  const auto zeroes = GENERATE(true, false);
  Training training = with_options([=](ShardOptions& options) {
    if (!shards) options.replicate = std::exchange(options.shard, nullptr);
  });
  training.pass = [=](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    for (const auto& unit : net.model().units()) unit->zero_unused(zeroes);
    const int rank = group.rank();
    net.uses_bias = [=](int layer) { return layer > 0 || (rank == 0 && step == 0); };
    run_pass(net, group, device, step);
  };
  require_host_bits(2, training);
}

TEST_CASE("a function in place of the collective, on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    for (const auto& unit : net.model().units()) {
      unit->reduce_by([&group](const at::Tensor& gradients, const at::Tensor& average) {
        group.reduce_scatter_into(average, gradients, {ReduceOp::Avg});
      });
    }
    run_pass(net, group, device, step);
  };
  require_host_bits(2, training);
}

TEST_CASE("layers in streams of their own", "[fsdp]") {
  const auto keeps_unsharded = GENERATE(false, true);
  Training training =
      with_options([=](ShardOptions& options) { options.keep_unsharded = keeps_unsharded; });
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    const auto last = std::make_shared<at::Tensor>();
    net.run_layer = [=](int layer, const std::function<at::Tensor()>& compute) {
      *last = layer % 2 == 1 ? in_side_stream(device, *last, compute) : compute();
      return *last;
    };
    run_pass(net, group, device, step);
  };
  require_host_bits(2, training);
}

TEST_CASE("norms of sharded gradients on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    run_pass(net, group, device, step);
    const std::vector<double> kinds{2.0, 1.0, 3.0, 0.0, INFINITY, -INFINITY};
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : net.parameters()) gradients.push_back(p.grad());
    if (step == 2 && group.rank() == 1) gradients.assign(gradients.size(), at::Tensor());
    for (const double kind : kinds) {
      const at::Tensor norm =
          total_norm({{group.shared_from_this(), at::kFloat, gradients, device}}, kind);
      expect(norm.device() == device, "the norm stays on the device");
      scale_gradients(gradients, clip_factor(norm, 0.5));
    }
  };
  require_host_bits(2, training);
}

TEST_CASE("ranks that run other units on devices are told", "[fsdp]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    ShardedNet net({.shard = group.shared_from_this()}, device, {8, 4});
    if (group.rank() == 1) {
      net.choose_layer = [](int layer) { return layer == 1 ? 2 : layer == 2 ? 1 : layer; };
    }
    const std::string text = message_of<Error>([&] {
      for (int step = 0; step < 1000; ++step) {
        run_pass(net, group, device, step);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    expect(contains(text, "called different collectives"), text);
    expect(contains(text, "until the end of a forward"), text);
  });
}

TEST_CASE("a forward that throws leaves a model that goes on, on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    const at::Tensor x = batch_at(group.rank(), step).to(device);
    net.run_layer = [](int layer, const std::function<at::Tensor()>& compute) {
      if (layer == 2) throw std::runtime_error("no forward today");
      return compute();
    };
    const auto forward = [&] { net.forward(x); };
    expect(contains(message_of<std::runtime_error>(forward), "no forward"), "it throws");
    net.run_layer = [](int, const std::function<at::Tensor()>& compute) { return compute(); };
    run_pass(net, group, device, step);
  };
  require_host_bits(2, training);
}
