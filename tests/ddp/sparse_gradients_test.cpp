// Sparse gradients through the Reducer and through DistributedDataParallel.

#include "libddp/ddp/sparse_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "libddp/base/error.h"
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

using Rows = std::vector<std::int64_t>;

/// Two tables with sparse gradients around a dense vector.
NamedTensors tables() {
  const auto leaf = [](at::Tensor t) { return t.set_requires_grad(true); };
  return {{"first", leaf(at::ones({6, 2}))},
          {"dense", leaf(at::ones({4}))},
          {"second", leaf(at::ones({5, 3}, at::kDouble))}};
}

ReducerOptions both_tables() {
  ReducerOptions options;
  options.sparse_parameters = {"first", "second"};
  return options;
}

/// Each lookup gives its row the gradient `scale`.
at::Tensor lookups(const at::Tensor& table, const Rows& rows, double scale) {
  return (at::embedding(table, at::tensor(rows, at::kLong), -1, false, /*sparse=*/true) * scale)
      .sum();
}

bool is_mean(const NamedTensor& table, const at::Tensor& expected) {
  const at::Tensor& grad = table.tensor.grad();
  return grad.defined() && grad.is_sparse() && grad.is_coalesced() &&
         grad.scalar_type() == table.tensor.scalar_type() &&
         grad.to_dense().to(at::kDouble).equal(expected.to(at::kDouble));
}

void clear_all(const NamedTensors& parameters) {
  for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
}

TEST_CASE("sparse gradients are averaged beside dense ones", "[sparse]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = tables();
    const auto reducer = Reducer::create(parameters, group, both_tables());
    expect(reducer->num_buckets() == 1, "only the dense one has a bucket");
    const int rank = group->rank();
    for (int step = 0; step < 3; ++step) {
      clear_all(parameters);
      // Row 2 twice on rank 0, rows 2 and 5 on rank 1; of the second table a row each.
      const Rows rows = rank == 0 ? Rows{2, 2} : Rows{2, 5};
      const at::Tensor loss = lookups(parameters[0].tensor, rows, 1) +
                              (parameters[1].tensor * (rank + 1)).sum() +
                              lookups(parameters[2].tensor, {rank}, 4);
      reducer->prepare_for_backward({loss});
      loss.backward();
      at::Tensor first = at::zeros({6, 2});
      first[2].fill_(1.5);
      first[5].fill_(0.5);
      at::Tensor second = at::zeros({5, 3});
      second[0].fill_(2);
      second[1].fill_(2);
      expect(is_mean(parameters[0], first), "first");
      expect(is_mean(parameters[2], second), "second");
      expect(parameters[1].tensor.grad().equal(at::full({4}, 1.5)), "dense");
    }
  });
}

TEST_CASE("a model may have sparse parameters only", "[sparse]") {
  with_groups(3, [](const Group& group) {
    const NamedTensors parameters = {tables()[0]};
    const auto reducer = Reducer::create(parameters, group, both_tables());
    expect(reducer->num_buckets() == 0, "no bucket");
    for (int step = 0; step < 3; ++step) {
      clear_all(parameters);
      const at::Tensor loss = lookups(parameters[0].tensor, {group->rank()}, 3);
      // The first gradient tells of a pass whose output was not seen.
      reducer->prepare_for_backward(step == 1 ? std::vector<at::Tensor>{}
                                              : std::vector<at::Tensor>{loss});
      loss.backward();
      at::Tensor expected = at::zeros({6, 2});
      for (int r = 0; r < 3; ++r) expected[r].fill_(1);
      expect(is_mean(parameters[0], expected), "mean");
    }
  });
}

TEST_CASE("passes without synchronisation add up sparsely", "[sparse]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = {tables()[0]};
    const auto reducer = Reducer::create(parameters, group, both_tables());
    const int rank = group->rank();
    lookups(parameters[0].tensor, {rank}, 2).backward();
    expect(parameters[0].tensor.grad().to_dense()[1 - rank].equal(at::zeros({2})), "local only");
    const at::Tensor loss = lookups(parameters[0].tensor, {rank, 4}, 2);
    reducer->prepare_for_backward({loss});
    loss.backward();
    at::Tensor expected = at::zeros({6, 2});
    expected[0].fill_(2);
    expected[1].fill_(2);
    expected[4].fill_(2);
    expect(is_mean(parameters[0], expected), "the mean of both passes");
  });
}

TEST_CASE("an unused sparse parameter is named on every rank", "[sparse]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = tables();
    const auto reducer = Reducer::create(parameters, group, both_tables());
    at::Tensor loss = lookups(parameters[0].tensor, {0}, 1) + parameters[1].tensor.sum();
    if (group->rank() == 0) loss = loss + lookups(parameters[2].tensor, {0}, 1);
    reducer->prepare_for_backward({loss});
    const std::string text = message_of<StateError>([&] { loss.backward(); });
    expect(contains(text, "1 of 3 parameters got no gradient: 'second' (rank 1)"), text);
    clear_all(parameters);
    const at::Tensor next = lookups(parameters[0].tensor, {0}, 1) + parameters[1].tensor.sum() +
                            lookups(parameters[2].tensor, {0}, 1);
    reducer->prepare_for_backward({next});
    next.backward();
    expect(parameters[2].tensor.grad().defined(), "goes on after the error");
  });
}

TEST_CASE("find_unused and static graph: zeros count, what nobody used stays", "[sparse]") {
  const bool is_static = GENERATE(true, false);
  with_groups(2, [&](const Group& group) {
    const NamedTensors parameters = tables();
    ReducerOptions options = both_tables();
    options.find_unused_parameters = !is_static;
    options.static_graph = is_static;
    const auto reducer = Reducer::create(parameters, group, options);
    for (int step = 0; step < 3; ++step) {
      clear_all(parameters);
      at::Tensor loss = parameters[1].tensor.sum();
      if (group->rank() == 1) loss = loss + lookups(parameters[0].tensor, {3}, 2);
      reducer->prepare_for_backward({loss});
      loss.backward();
      at::Tensor expected = at::zeros({6, 2});
      expected[3].fill_(1);
      expect(is_mean(parameters[0], expected), "used by rank 1");
      expect(!parameters[2].tensor.grad().defined(), "used by nobody");
    }
  });
}

TEST_CASE("a dense gradient for a sparse parameter makes all of them dense", "[sparse]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = {tables()[0]};
    const auto reducer = Reducer::create(parameters, group, both_tables());
    at::Tensor loss = lookups(parameters[0].tensor, {1}, 2);
    if (group->rank() == 0) loss = loss + parameters[0].tensor.sum() * 4;
    reducer->prepare_for_backward({loss});
    loss.backward();
    at::Tensor expected = at::full({6, 2}, 2.0);
    expected[1].fill_(4);
    expect(parameters[0].tensor.grad().equal(expected), "dense mean");
  });
}

TEST_CASE("a rank without data contributes nothing and sees the average", "[sparse]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = tables();
    const auto reducer = Reducer::create(parameters, group, both_tables());
    for (int step = 0; step < 2; ++step) {
      // The joined rank keeps its gradient of the step before; it does not count.
      reducer->set_gradient_scale(2);
      if (group->rank() == 0) {
        clear_all(parameters);
        const at::Tensor loss = lookups(parameters[0].tensor, {step}, 3) +
                                parameters[1].tensor.sum() + lookups(parameters[2].tensor, {0}, 1);
        reducer->prepare_for_backward({loss});
        loss.backward();
      } else {
        reducer->run_empty_pass();
      }
      at::Tensor expected = at::zeros({6, 2});
      expected[step].fill_(3);
      expect(is_mean(parameters[0], expected), "the average of the ranks with data");
    }
  });
}

TEST_CASE("a gradient of another dtype is refused by name", "[sparse]") {
  with_groups(1, [](const Group& group) {
    const NamedTensors parameters = {tables()[0]};
    const SparseGradients sparse(parameters, {"first"}, group);
    parameters[0].tensor.mutable_grad() = at::ones({6, 2}, at::kDouble);
    const std::string text = message_of<ArgumentError>([&] { sparse.check(0); });
    expect(contains(text, "'first': its gradient is Double in layout Strided"), text);
  });
}

/// An embedding, and a bag that shares nothing with it.
struct WordNet : torch::nn::Module {
  WordNet() {
    using torch::nn::EmbeddingBagOptions;
    using torch::nn::EmbeddingOptions;
    words = register_module("words", torch::nn::Embedding(EmbeddingOptions(9, 4).sparse(true)));
    bags = register_module(
        "bags", torch::nn::EmbeddingBag(EmbeddingBagOptions(7, 4).sparse(true).mode(torch::kSum)));
    plain = register_module("plain", torch::nn::Embedding(9, 4));
    out = register_module("out", torch::nn::Linear(4, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor small = x.remainder(7);
    return out->forward(words->forward(x).sum(1) + bags->forward(small) + plain->forward(x).sum(1));
  }
  torch::nn::Embedding words = nullptr;
  torch::nn::EmbeddingBag bags = nullptr;
  torch::nn::Embedding plain = nullptr;
  torch::nn::Linear out = nullptr;
};

TEST_CASE("embeddings of LibTorch are found, and ranks train alike", "[sparse]") {
  std::vector<std::vector<at::Tensor>> weights(2);
  with_groups(2, [&](const Group& group) {
    const auto net = std::make_shared<WordNet>();
    const std::vector<std::string> names = sparse_parameters(*net, named_parameters(*net));
    expect(names == std::vector<std::string>{"words.weight", "bags.weight"}, "the sparse ones");
    DistributedDataParallel model(net, group);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const std::int64_t word = group->rank() + step;
      model.forward(at::tensor({word, word, std::int64_t{8}}, at::kLong).unsqueeze(0))
          .pow(2)
          .sum()
          .backward();
      expect(net->words->weight.grad().is_sparse(), "sparse");
      expect(net->bags->weight.grad().is_sparse(), "sparse");
      expect(!net->plain->weight.grad().is_sparse(), "dense");
      optimizer.step();
    }
    weights[group->rank()] = net->parameters();
  });
  for (std::size_t i = 0; i < weights[0].size(); ++i) CHECK(weights[0][i].equal(weights[1][i]));
}

TEST_CASE("ranks that disagree about sparse parameters, and unknown names", "[sparse]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = tables();
    DistributedDataParallelOptions options;
    if (group->rank() == 1) options.sparse_parameters = {"second"};
    const std::string text =
        message_of<ArgumentError>([&] { ReplicatedModel(parameters, {}, group, options); });
    expect(contains(text, "'second' Double [5, 3] requires_grad=true with sparse gradients"), text);
    options.sparse_parameters = {"third"};
    expect(contains(
               message_of<ArgumentError>([&] { ReplicatedModel(parameters, {}, group, options); }),
               "'third', which is no parameter"),
           "unknown name");
  });
}

}  // namespace
}  // namespace libddp
