#pragma once

// A network on a device, its replica, and an AdamW whose work the ranks may share.
//
//   TrainedReplica trained(group, device, Sharing::State);
//   trained.step(batch(group->rank(), 0, device));

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/adamw.h>

#include <optional>
#include <vector>

#include "libddp/ddp/replicated_model.h"
#include "libddp/optim/adamw.h"
#include "tests/cuda/ddp_fixture.h"

namespace libddp::test {

/// What the ranks share out.
enum class Sharing { Nothing, State, Gradients };

struct TrainedReplica {
  TrainedReplica(const Group& group, c10::Device device, Sharing sharing, bool amsgrad = false)
      : net(device), model(net.parameters(), {}, group, options()) {
    std::vector<at::Tensor> parameters;
    for (const NamedTensor& parameter : net.parameters()) parameters.push_back(parameter.tensor);
    AdamWExtras extras;
    if (sharing != Sharing::Nothing) extras.shard_over = &model;
    extras.shard_gradients = sharing == Sharing::Gradients;
    optimizer.emplace(parameters, torch::optim::AdamWOptions(0.05).amsgrad(amsgrad), extras);
  }

  /// Buckets of about two parameters each.
  static DistributedDataParallelOptions options() {
    DistributedDataParallelOptions options;
    options.cap_bytes = options.first_bytes = 128;
    return options;
  }

  void rejoin(const Group& group) {
    model.rejoin(group, {}, options());
    optimizer->rejoin(model);
  }
  at::Tensor loss(const at::Tensor& input) {
    model.before_forward();
    at::Tensor loss = net.loss(input);
    model.after_forward({loss}, true);
    return loss;
  }
  void step(const at::Tensor& input) {
    net.clear();
    loss(input).backward();
    optimizer->step();
  }

  TrainedNet net;
  ReplicatedModel model;
  std::optional<AdamW> optimizer;
};

}  // namespace libddp::test
