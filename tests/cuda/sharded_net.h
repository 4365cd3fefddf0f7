#pragma once

// A small sharded model for tests, on the CPU or a fake device: linear layers that are a unit each,
// some of whose rows do not divide evenly, and a scale of the root. Values depend on nothing but
// the sizes.
//
//   ShardedNet net({.shard = group}, device);
//   mean_square(net.forward(batch_at(rank, step).to(device))).backward();
//   net.step();

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/fsdp/param_group.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/fsdp/sharded_model.h"

namespace libddp::test {

struct NetSize {
  int width = 7;
  int layers = 4;
};

class ShardedNet {
 public:
  ShardedNet(const ShardOptions& options, c10::Device device, NetSize size = {},
             ShardedModelOptions model_options = {});

  at::Tensor forward(const at::Tensor& x);
  /// Of the root first; what they show.
  std::vector<at::Tensor> parameters() const;
  /// Plain gradient descent on that.
  void step() const;
  /// On the CPU.
  std::vector<at::Tensor> gradients() const;
  std::vector<at::Tensor> whole_parameters();
  ShardedModel& model() { return *model_; }
  /// Runs a layer's computation; replaced by tests that use streams of their own.
  std::function<at::Tensor(int layer, const std::function<at::Tensor()>& compute)> run_layer;
  /// Which layer runs in the place of one.
  std::function<int(int layer)> choose_layer = [](int layer) { return layer; };
  /// What a layer's forward, or with -1 that of the root, gives back beside its result.
  std::function<std::vector<at::Tensor>(int layer, const at::Tensor& result)> more_outputs =
      [](int, const at::Tensor&) { return std::vector<at::Tensor>{}; };
  /// Whether a layer uses its bias.
  std::function<bool(int layer)> uses_bias = [](int) { return true; };

 private:
  at::Tensor run_layers(at::Tensor x);

  const std::optional<at::ScalarType> dtype_;
  std::vector<NamedTensors> layers_;
  NamedTensors root_;
  std::shared_ptr<ShardedModel> model_;
};

at::Tensor batch_at(int rank, int step);
at::Tensor mean_square(const at::Tensor& output);

/// Ranks' results in the order of the ranks: gradients and parameters of some steps.
using Results = std::vector<std::vector<at::Tensor>>;

/// What a rank trains, and what it has in the end. `options` from its group.
struct Training {
  std::function<ShardOptions(ProcessGroup&)> options = [](ProcessGroup& group) {
    return ShardOptions{.shard = group.shared_from_this()};
  };
  /// One step of training; the default runs a pass.
  std::function<void(ShardedNet&, ProcessGroup&, c10::Device, int step)> pass{};
  ShardedModelOptions model_options{};
  NetSize size{};
  int num_steps = 3;
};
std::vector<at::Tensor> train(ProcessGroup& group, c10::Device device, const Training& training);
/// On the CPU, and on fake devices: no races, and the same bits.
Results on_host(int world_size, const Training& training);
Results on_devices(int world_size, const Training& training);
void require_same(const Results& found, const Results& wanted);
/// Devices give the bits of the host, and order every access.
void require_host_bits(int world_size, const Training& training);

}  // namespace libddp::test
