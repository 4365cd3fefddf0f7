#include "tests/cuda/sharded_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include <exception>
#include <utility>

#include "tests/cuda/device_fixture.h"
#include "tests/support/catch.h"

namespace libddp::test {
namespace {

at::Tensor wave(at::IntArrayRef sizes, double seed) {
  const std::int64_t numel = c10::multiply_integers(sizes);
  return at::sin(at::arange(numel, at::kFloat) * 0.37 + seed).view(sizes);
}

at::Tensor wave_leaf(at::IntArrayRef sizes, double seed, c10::Device device) {
  return wave(sizes, seed).to(device).set_requires_grad(true);
}

}  // namespace

ShardedNet::ShardedNet(const ShardOptions& options, c10::Device device, NetSize size,
                       ShardedModelOptions model_options)
    : dtype_(options.param_dtype) {
  run_layer = [](int, const auto& compute) { return compute(); };
  const int width = size.width;
  root_ = {{"scale", wave_leaf({width}, 4, device)}};
  std::vector<std::shared_ptr<ParamGroup>> units{std::make_shared<ParamGroup>("", root_, options)};
  for (int l = 0; l < size.layers; ++l) {
    layers_.push_back({{"weight", wave_leaf({width, l == 0 ? 5 : width}, l, device)},
                       {"bias", wave_leaf({width}, l + 9, device)}});
    units.push_back(
        std::make_shared<ParamGroup>("layer." + std::to_string(l), layers_.back(), options));
  }
  model_ = ShardedModel::create(std::move(units), std::move(model_options));
}

at::Tensor ShardedNet::forward(const at::Tensor& x) {
  ParamGroup& root = *model_->units()[0];
  model_->before_forward(root);
  std::vector<at::Tensor> outputs;
  try {
    const at::Tensor y = run_layers(dtype_ ? x.to(*dtype_) : x) * root_[0].tensor;
    outputs = more_outputs(-1, y);
    outputs.push_back(y);
  } catch (const std::exception& error) {
    model_->forward_failed(root, error.what());
    throw;
  }
  model_->after_forward(root, outputs);
  return outputs.back();
}

at::Tensor ShardedNet::run_layers(at::Tensor x) {
  for (int place = 0; place < static_cast<int>(layers_.size()); ++place) {
    const int l = choose_layer(place);
    ParamGroup& unit = *model_->units()[static_cast<std::size_t>(l) + 1];
    x = run_layer(l, [&] {
      model_->before_forward(unit);
      const NamedTensors& layer = layers_[static_cast<std::size_t>(l)];
      const at::Tensor bias = uses_bias(l) ? layer[1].tensor : at::Tensor();
      at::Tensor y = at::tanh(at::linear(x, layer[0].tensor, bias));
      std::vector<at::Tensor> outputs = more_outputs(l, y);
      outputs.push_back(y);
      model_->after_forward(unit, outputs);
      return y;
    });
  }
  return x;
}

std::vector<at::Tensor> ShardedNet::parameters() const {
  std::vector<at::Tensor> all{root_[0].tensor};
  for (const NamedTensors& layer : layers_) {
    for (const auto& [name, tensor] : layer) all.push_back(tensor);
  }
  return all;
}

void ShardedNet::step() const {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters()) {
    if (p.grad().defined()) p.sub_(p.grad() * 0.05);
    p.mutable_grad() = at::Tensor();
  }
}

std::vector<at::Tensor> ShardedNet::gradients() const {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : parameters()) {
    if (p.grad().defined()) all.push_back(p.grad().cpu().clone());
  }
  return all;
}

std::vector<at::Tensor> ShardedNet::whole_parameters() {
  model_->show_copies();
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : parameters()) all.push_back(p.detach().cpu().clone());
  model_->end_copies(false);
  return all;
}

at::Tensor batch_at(int rank, int step) { return wave({4, 5}, rank * 3.1 + step); }

at::Tensor mean_square(const at::Tensor& output) { return output.to(at::kFloat).pow(2).mean(); }

namespace {

std::vector<at::Tensor> train_over(const ShardOptions& options, ProcessGroup& group,
                                   c10::Device device, const Training& training) {
  ShardedNet net(options, device, training.size, training.model_options);
  std::vector<at::Tensor> results;
  for (int step = 0; step < training.num_steps; ++step) {
    if (training.pass) {
      training.pass(net, group, device, step);
    } else {
      mean_square(net.forward(batch_at(group.rank(), step).to(device))).backward();
    }
    for (at::Tensor& gradient : net.gradients()) results.push_back(std::move(gradient));
    net.step();
  }
  for (at::Tensor& parameter : net.whole_parameters()) results.push_back(std::move(parameter));
  return results;
}

}  // namespace

std::vector<at::Tensor> train(ProcessGroup& group, c10::Device device, const Training& training) {
  const ShardOptions options = training.options(group);
  std::vector<at::Tensor> results = train_over(options, group, device, training);
  // Not dropped: the other ranks may still be in the last step.
  for (const Group& own : {options.shard, options.replicate}) {
    if (own && own.get() != &group) own->shutdown();
  }
  return results;
}

Results on_host(int world_size, const Training& training) {
  Results results(static_cast<std::size_t>(world_size));
  run_group(world_size, [&](ProcessGroup& group) {
    results[static_cast<std::size_t>(group.rank())] =
        train(group, c10::Device(c10::kCPU), training);
  });
  return results;
}

Results on_devices(int world_size, const Training& training) {
  Results results(static_cast<std::size_t>(world_size));
  run_device_group(world_size, [&](ProcessGroup& group, c10::Device device) {
    results[static_cast<std::size_t>(group.rank())] = train(group, device, training);
  });
  return results;
}

void require_same(const Results& found, const Results& wanted) {
  REQUIRE(found.size() == wanted.size());
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    REQUIRE(found[rank].size() == wanted[rank].size());
    for (std::size_t i = 0; i < found[rank].size(); ++i) {
      expect_equal(found[rank][i], wanted[rank][i],
                   "rank " + std::to_string(rank) + ", tensor " + std::to_string(i));
    }
  }
}

void require_host_bits(int world_size, const Training& training) {
  const Results wanted = on_host(world_size, training);
  const Results found = on_devices(world_size, training);
  REQUIRE(races_text() == "");
  require_same(found, wanted);
}

}  // namespace libddp::test
