// Trains the transformer of ../ddp sharded over the ranks. README.md says how to start it.

#include <ATen/DeviceGuard.h>
#include <libddp/libddp.h>
#include <torch/utils.h>

#include <utility>

#include "restarts.h"
#include "training.h"
#include "transformer.h"

namespace {

constexpr double kMaxNorm = 1.0;

void train(const Options& options, const Text& text) {
  const at::Device device = choose_device(options);
  const at::DeviceGuard guard(device);
  const libddp::Group group = libddp::init_process_group();
  torch::manual_seed(options.seed);
  Transformer net(
      TransformerConfig{.vocabulary = text.vocabulary(), .context = text.shape().context});
  net->to(device);
  const libddp::ShardOptions sharding{.shard = group};
  libddp::fully_shard_each(net->blocks(), sharding);
  libddp::FullyShardedDataParallel model(net, sharding);
  const auto forward = [&](const at::Tensor& tokens) { return model.forward(tokens); };
  const auto optimizer = make_optimizer(options, net->parameters());
  Restarts restarts(options, group, net.ptr(), *optimizer);
  for (std::int64_t step = restarts.resume(); step < options.steps; ++step) {
    optimizer->zero_grad();
    Batch batch = text.batch(options.seed, step, group->rank());
    const at::Tensor loss = forward_and_backward(forward, std::move(batch), text.shape(), device);
    model.clip_grad_norm(kMaxNorm);
    optimizer->step();
    report(group, step, loss);
    restarts.save(step + 1);
  }
  restarts.close();
  group->shutdown();
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, train); }
