#include "training.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/from_blob.h>
#include <torch/cuda.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

/// int64 [rows, context] that looks into `tokens`.
at::Tensor as_tensor(std::vector<std::int64_t>& tokens, BatchShape shape) {
  return at::from_blob(tokens.data(), {shape.rows, shape.context}, at::kLong);
}

/// The library's messages name the rank after it has joined; what fails before is known by RANK.
void print_error(const std::exception& error) {
  const char* rank = std::getenv("RANK");
  const std::string place = rank == nullptr ? "" : std::string(" rank ") + rank + ":";
  std::fprintf(stderr, "train:%s %s\n", place.c_str(), error.what());
}

}  // namespace

at::Device choose_device(const Options& options) {
  const auto num_devices = static_cast<int>(torch::cuda::device_count());
  const bool is_auto = options.device == DeviceKind::Auto;
  if (options.device == DeviceKind::Cpu || (is_auto && num_devices == 0)) return at::kCPU;
  const char* local_rank = std::getenv("LOCAL_RANK");
  const int index = local_rank == nullptr ? 0 : std::atoi(local_rank);
  if (index >= num_devices) {
    throw std::invalid_argument(std::string("--device '") + (is_auto ? "auto" : "cuda") +
                                "': this rank takes GPU " + std::to_string(index) +
                                " (LOCAL_RANK), and torch sees " + std::to_string(num_devices) +
                                ". Hint: --device cpu, or one rank for each GPU.");
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options,
                                                        std::vector<at::Tensor> parameters,
                                                        libddp::ReplicatedModel* replica) {
  const double lr = options.learning_rate;
  if (options.optimizer == OptimizerKind::Sgd) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(lr).momentum(0.9));
  }
  const bool is_shared = options.optimizer == OptimizerKind::Zero1;
  if (is_shared && replica == nullptr) {
    throw std::invalid_argument(
        "--optimizer 'zero1' is for a data-parallel model, this one is sharded. Hint: adamw.");
  }
  return std::make_unique<libddp::AdamW>(
      std::move(parameters), torch::optim::AdamWOptions(lr).weight_decay(0.01),
      libddp::AdamWExtras{.shard_over = is_shared ? replica : nullptr});
}

at::Tensor forward_and_backward(const std::function<at::Tensor(const at::Tensor&)>& forward,
                                Batch batch, BatchShape shape, at::Device device) {
  const at::Tensor logits = forward(as_tensor(batch.tokens, shape).to(device));
  const at::Tensor targets = as_tensor(batch.targets, shape).to(device);
  const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
  loss.backward();
  return loss.detach();
}

void report(const libddp::Group& group, std::int64_t step, const at::Tensor& loss) {
  const at::Tensor average = loss.clone();
  group->all_reduce(average, {.op = libddp::ReduceOp::Avg});
  if (group->rank() != 0) return;
  std::printf("step %lld loss %.9g average %.9g\n", static_cast<long long>(step),
              loss.item<float>(), average.item<float>());
  std::fflush(stdout);
}

int run_program(int argc, char** argv,
                const std::function<void(const Options&, const Text&)>& train) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) return std::fputs(usage().c_str(), stdout) < 0;
    at::set_num_threads(options.threads);
    train(options, Text(options.data, BatchShape{}));
    return 0;
  } catch (const std::exception& error) {
    print_error(error);
    return 1;
  }
}
