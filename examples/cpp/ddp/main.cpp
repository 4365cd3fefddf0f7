// Trains a small character-level transformer on all ranks. README.md says how to start it.

#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/from_blob.h>
#include <libddp/libddp.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data.h"
#include "options.h"
#include "transformer.h"

namespace {

using Model = libddp::DistributedDataParallel<TransformerImpl>;

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options,
                                                        std::vector<at::Tensor> parameters) {
  const double lr = options.learning_rate;
  if (options.optimizer == OptimizerKind::Sgd) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(lr).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                               torch::optim::AdamWOptions(lr).weight_decay(0.01));
}

/// int64 [rows, context] that looks into `tokens`.
at::Tensor as_tensor(std::vector<std::int64_t>& tokens, BatchShape shape) {
  return at::from_blob(tokens.data(), {shape.rows, shape.context}, at::kLong);
}

/// Mean cross entropy of this rank's batch, after its gradients have been averaged over the ranks.
at::Tensor forward_and_backward(Model& model, Batch batch, BatchShape shape) {
  const at::Tensor logits = model.forward(as_tensor(batch.tokens, shape));
  const at::Tensor targets = as_tensor(batch.targets, shape);
  const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
  loss.backward();
  return loss.detach();
}

/// Collective. %.9g gives every bit of a float32, so two runs can be compared.
void report(const libddp::Group& group, std::int64_t step, const at::Tensor& loss) {
  const at::Tensor average = loss.clone();
  group->all_reduce(average, {.op = libddp::ReduceOp::Avg});
  if (group->rank() != 0) return;
  std::printf("step %lld loss %.9g average %.9g\n", static_cast<long long>(step),
              loss.item<float>(), average.item<float>());
  std::fflush(stdout);
}

void train(const Options& options, const Text& text) {
  at::set_num_threads(options.threads);
  const libddp::Group group = libddp::init_process_group();
  torch::manual_seed(options.seed);
  Transformer net(
      TransformerConfig{.vocabulary = text.vocabulary(), .context = text.shape().context});
  Model model(net, group);
  const auto optimizer = make_optimizer(options, net->parameters());
  for (std::int64_t step = 0; step < options.steps; ++step) {
    optimizer->zero_grad();
    Batch batch = text.batch(options.seed, step, group->rank());
    const at::Tensor loss = forward_and_backward(model, std::move(batch), text.shape());
    optimizer->step();
    report(group, step, loss);
  }
  group->shutdown();
}

/// The library's messages name the rank after it has joined; what fails before is known by RANK.
void print_error(const std::exception& error) {
  const char* rank = std::getenv("RANK");
  const std::string place = rank == nullptr ? "" : std::string(" rank ") + rank + ":";
  std::fprintf(stderr, "train:%s %s\n", place.c_str(), error.what());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) return std::fputs(usage().c_str(), stdout) < 0;
    train(options, Text(options.data, BatchShape{}));
    return 0;
  } catch (const std::exception& error) {
    print_error(error);
    return 1;
  }
}
