// Sharded training on devices: the bits of the host's, and every access ordered.

#include <ATen/TensorOperators.h>

#include "tests/cuda/device_fixture.h"
#include "tests/cuda/sharded_net.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("sharded steps on devices have the host's bits", "[fsdp]") {
  for (const int world_size : {1, 2, 4}) require_host_bits(world_size, {});
}

TEST_CASE("ranks that own no rows of a parameter, on devices", "[fsdp]") {
  Training training;
  training.size = {3, 3};
  require_host_bits(4, training);
}

TEST_CASE("a pass that brings gradients of a unit twice, on devices", "[fsdp]") {
  Training training;
  training.pass = [](ShardedNet& net, ProcessGroup& group, c10::Device device, int step) {
    // Two backward passes of one forward: the second adds to what the first has averaged.
    const at::Tensor y = net.forward(batch_at(group.rank(), step).to(device));
    mean_square(y).backward({}, /*retain_graph=*/true);
    mean_square(y).backward();
  };
  require_host_bits(2, training);
}

TEST_CASE("units that stay whole, and units that are not prefetched, on devices", "[fsdp]") {
  Training keeps;
  keeps.options = [](ProcessGroup& group) {
    return ShardOptions{.shard = group.shared_from_this(), .keep_unsharded = true};
  };
  require_host_bits(2, keeps);
  Training plain;
  plain.model_options = {.forward_prefetch = false, .backward_prefetch = false};
  require_host_bits(2, plain);
}
