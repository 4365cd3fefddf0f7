// Batches of several ranks against torch::nn::BatchNorm over all of them in one process.

#include "libddp/ddp/sync_batch_norm.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "libddp/ddp/distributed_data_parallel.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

using Shape = std::vector<std::int64_t>;

at::Tensor numbers(const Shape& shape, double seed) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return torch::sin(torch::arange(count, torch::kDouble) * 0.7 + seed).view(shape) * 2 + 3;
}

/// What one rank brings along: `rows` of shape [rows, 3, ...].
struct Batches {
  std::vector<std::int64_t> rows;
  Shape rest;
};

std::vector<at::Tensor> cut(const at::Tensor& whole, const Batches& batches) {
  return whole.split_with_sizes(batches.rows);
}

std::int64_t total(const Batches& batches) {
  std::int64_t sum = 0;
  for (const std::int64_t rows : batches.rows) sum += rows;
  return sum;
}

at::Tensor whole_batch(const Batches& batches, double seed, c10::ScalarType dtype) {
  Shape shape = {total(batches), 3};
  shape.insert(shape.end(), batches.rest.begin(), batches.rest.end());
  return numbers(shape, seed).to(dtype);
}

void set_parameters(const at::Tensor& weight, const at::Tensor& bias) {
  const torch::NoGradGuard no_grad;
  if (!weight.defined()) return;
  weight.copy_(torch::linspace(0.5, 2, 3));
  bias.copy_(torch::linspace(-1, 1, 3));
}

/// BatchNorm of any number of dimensions, over all batches.
struct Alone {
  explicit Alone(const torch::nn::BatchNormOptions& options, c10::ScalarType dtype, int num_dims)
      : norm(options), num_dims(num_dims) {
    norm->to(dtype);
    set_parameters(norm->weight, norm->bias);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor flat = x.transpose(0, 1).reshape({3, -1}).t();  // values per channel in rows
    const at::Tensor y = norm(flat);
    Shape shape = {3, x.size(0)};
    for (int i = 2; i < num_dims; ++i) shape.push_back(x.size(i));
    return y.t().reshape(shape).transpose(0, 1);
  }
  torch::nn::BatchNorm1d norm;
  int num_dims;
};

void expect_close(const at::Tensor& actual, const at::Tensor& wanted, const std::string& what,
                  double tolerance) {
  expect(actual.defined() == wanted.defined(), what + " is there");
  if (!wanted.defined()) return;
  expect(actual.sizes() == wanted.sizes(), what + ": shape");
  expect(
      torch::allclose(actual.to(torch::kDouble), wanted.to(torch::kDouble), tolerance, tolerance),
      what);
}

/// Parameters and buffers of both, after two batches.
void expect_equal_training(const Batches& batches, const torch::nn::BatchNormOptions& options,
                           c10::ScalarType dtype, double tolerance) {
  const int num_dims = 2 + static_cast<int>(batches.rest.size());
  with_groups(static_cast<int>(batches.rows.size()), [&](const Group& group) {
    Alone alone(options, dtype, num_dims);
    SyncBatchNorm norm(options, group);
    norm->to(dtype);
    set_parameters(norm->weight, norm->bias);
    const int rank = group->rank();
    for (const double seed : {1.0, 40.0}) {
      const at::Tensor whole = whole_batch(batches, seed, dtype).requires_grad_();
      const at::Tensor weights = whole_batch(batches, seed + 7, dtype);
      const at::Tensor wanted = alone.forward(whole);
      (wanted * weights).sum().backward();
      const at::Tensor mine = cut(whole.detach(), batches)[rank].clone().requires_grad_();
      const at::Tensor output = norm(mine);
      (output * cut(weights, batches)[rank]).sum().backward();
      expect_close(output, cut(wanted, batches)[rank], "output", tolerance);
      expect_close(mine.grad(), cut(whole.grad(), batches)[rank], "the input's gradient",
                   tolerance);
      expect(output.scalar_type() == dtype && mine.grad().scalar_type() == dtype, "dtype");
    }
    for (const at::Tensor& parameter : norm->parameters()) {
      group->all_reduce(parameter.mutable_grad());
    }
    if (options.affine()) {
      expect_close(norm->weight.grad(), alone.norm->weight.grad(), "weight", tolerance * 10);
      expect_close(norm->bias.grad(), alone.norm->bias.grad(), "bias", tolerance * 10);
    }
    expect_close(norm->running_mean, alone.norm->running_mean, "running_mean", tolerance);
    expect_close(norm->running_var, alone.norm->running_var, "running_var", tolerance);
    expect_close(norm->num_batches_tracked, alone.norm->num_batches_tracked, "batches", 0);
  });
}

}  // namespace

TEST_CASE("ranks normalize as one process with all batches", "[sync_batch_norm]") {
  const Batches batches = GENERATE(values<Batches>({{{4, 4}, {}},
                                                    {{2, 5, 1}, {}},
                                                    {{3, 0, 2}, {4}},
                                                    {{2, 2}, {3, 4}},
                                                    {{1, 2}, {2, 3, 2}},
                                                    {{1, 1}, {}}}));
  expect_equal_training(batches, 3, torch::kFloat, 2e-5);
  expect_equal_training(batches, 3, torch::kDouble, 1e-12);
}

TEST_CASE("the options of a BatchNorm", "[sync_batch_norm]") {
  const Batches batches{{2, 3}, {5}};
  const torch::nn::BatchNormOptions plain(3);
  for (const auto& options : {torch::nn::BatchNormOptions(plain).affine(false),
                              torch::nn::BatchNormOptions(plain).track_running_stats(false),
                              torch::nn::BatchNormOptions(plain).momentum(std::nullopt),
                              torch::nn::BatchNormOptions(plain).eps(0.5).momentum(0.3)}) {
    expect_equal_training(batches, options, torch::kFloat, 2e-5);
  }
}

TEST_CASE("low precision computes in float32", "[sync_batch_norm]") {
  // One rounding of the output; of bfloat16 there are 8 bits.
  expect_equal_training({{3, 2}, {4}}, 3, torch::kBFloat16, 0.04);
}

TEST_CASE("inputs in bfloat16, parameters in float32", "[sync_batch_norm]") {
  with_groups(2, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    const at::Tensor x = numbers({4, 3, 5}, group->rank()).to(torch::kBFloat16).requires_grad_();
    const at::Tensor y = norm(x);
    y.sum().backward();
    expect(y.scalar_type() == torch::kBFloat16, "output");
    expect(x.grad().scalar_type() == torch::kBFloat16, "gradient");
    expect(norm->weight.grad().scalar_type() == torch::kFloat, "weight");
    expect(norm->running_var.scalar_type() == torch::kFloat, "running");
  });
}

TEST_CASE("means far from zero keep their digits", "[sync_batch_norm]") {
  with_groups(2, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    const at::Tensor whole = numbers({8, 3}, 1) + 4096;
    const at::Tensor exact = (whole - whole.mean(0)) / whole.var(0, /*unbiased=*/false).sqrt();
    const at::Tensor y = norm(whole.to(torch::kFloat).chunk(2)[group->rank()]);
    expect_close(y, exact.chunk(2)[group->rank()], "output", 1e-3);
  });
}

TEST_CASE("memory formats stay", "[sync_batch_norm]") {
  const auto format = GENERATE(at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast);
  with_groups(2, [&](const Group& group) {
    SyncBatchNorm norm(3, group);
    const at::Tensor x =
        numbers({2, 3, 4, 5}, group->rank()).to(torch::kFloat).contiguous(format).requires_grad_();
    const at::Tensor y = norm(x);
    expect(y.is_contiguous(format), "output");
    y.square().sum().backward();
    expect(x.grad().is_contiguous(format), "gradient");
  });
}

TEST_CASE("a net trains as in one process", "[sync_batch_norm]") {
  const auto net_of = [](auto norm) {
    torch::nn::Sequential net(torch::nn::Linear(4, 3), norm, torch::nn::ReLU(),
                              torch::nn::Linear(3, 2));
    const torch::NoGradGuard no_grad;
    double seed = 0;
    for (at::Tensor& p : net->parameters()) p.copy_(numbers(p.sizes().vec(), ++seed) - 3);
    return net;
  };
  const auto train = [](auto& model, const torch::nn::Sequential& net, const auto& batch_of) {
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      model.forward(batch_of(numbers({8, 4}, step).to(torch::kFloat))).square().mean().backward();
      optimizer.step();
    }
  };
  torch::nn::Sequential alone = net_of(torch::nn::BatchNorm1d(3));
  train(*alone, alone, [](const at::Tensor& batch) { return batch; });
  with_groups(2, [&](const Group& group) {
    torch::nn::Sequential net = net_of(SyncBatchNorm(3, group));
    DistributedDataParallel<torch::nn::SequentialImpl> model(net, group, {.cap_bytes = 40});
    train(model, net, [&](const at::Tensor& batch) { return batch.chunk(2)[group->rank()]; });
    const auto wanted = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      expect_close(item.value(), wanted[item.key()], item.key(), 1e-4);
    }
    for (const auto& item : alone->named_buffers()) {
      expect_close(net->named_buffers()[item.key()], item.value(), item.key(), 1e-4);
    }
  });
}

TEST_CASE("without collectives: eval, one rank", "[sync_batch_norm]") {
  with_groups(2, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    torch::nn::BatchNorm1d alone(3);
    norm->eval();
    alone->eval();
    const at::Tensor x = numbers({2, 3}, group->rank()).to(torch::kFloat);
    const std::uint64_t before = group->sequence_number();
    expect(torch::equal(norm(x), alone(x)), "eval");
    expect(group->sequence_number() == before, "no collective in eval");
  });
  with_groups(1, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    torch::nn::BatchNorm1d alone(3);
    const at::Tensor x = numbers({4, 3}, 1).to(torch::kFloat);
    expect(torch::equal(norm(x), alone(x)), "one rank");
    expect(torch::equal(norm->running_var, alone->running_var), "running_var");
    expect(norm->num_batches_tracked.item<int>() == 1, "counted once");
  });
}

TEST_CASE("what a synchronized norm refuses", "[sync_batch_norm]") {
  with_groups(2, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    for (const Shape& shape : {Shape{3}, Shape{2, 4}, Shape{2, 2, 3}}) {
      const std::string text =
          message_of<ArgumentError>([&] { norm(numbers(shape, 0).to(torch::kFloat)); });
      expect(contains(text, "SyncBatchNorm: takes floating-point [N, 3, ...], got Float"), text);
    }
    expect(contains(message_of<ArgumentError>([&] {
                      norm(torch::ones({2, 3}, torch::kLong));
                    }),
                    "got Long [2, 3]"),
           "integers");
    const at::Tensor one = torch::ones({group->rank() == 0 ? 1 : 0, 3});
    const std::string few = message_of<ArgumentError>([&] { norm(one); });
    expect(contains(few, "the batches of all ranks have 1 values per channel"), few);
    expect(norm->running_mean.eq(0).all().item<bool>(), "nothing of it is kept");

    const at::Tensor x = numbers({4, 3}, 1).to(torch::kFloat).requires_grad_();
    const at::Tensor loss = norm(x).square().sum();
    const std::string text = message_of<StateError>(
        [&] { torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, true); });
    expect(contains(text, "SyncBatchNorm: has no second gradients"), text);
  });
  expect(
      contains(message_of<ArgumentError>([] { SyncBatchNorm(3, nullptr); }), "there is no group"),
      "no group");
}

TEST_CASE("a synchronized norm prints its options", "[sync_batch_norm]") {
  with_groups(1, [](const Group& group) {
    std::ostringstream text;
    text << *SyncBatchNorm(torch::nn::BatchNormOptions(8).eps(0.5), group);
    expect(text.str() ==
               "libddp::SyncBatchNorm(8, eps=0.5, momentum=0.1, affine=true, "
               "track_running_stats=true)",
           text.str());
  });
}

}  // namespace libddp
