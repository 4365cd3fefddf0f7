// Trains one linear layer on two ranks (threads) with the installed library, and checks that both
// ranks end with the same weights and that the loss fell.

#include <libddp/libddp.h>
#include <torch/torch.h>

#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace {

constexpr int kWorldSize = 2;

struct Result {
  float first_loss = 0;
  float last_loss = 0;
  at::Tensor weight;
};

Result train(int rank, c10::intrusive_ptr<c10d::Store> store) {
  torch::manual_seed(rank);  // libddp gives every rank the weights of rank 0
  auto group = libddp::init_process_group(
      {.rank = rank, .world_size = kWorldSize, .store = std::move(store)});
  torch::nn::Linear net(4, 1);
  libddp::DistributedDataParallel model(net.ptr(), group);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  at::Tensor input = torch::randn({16, 4});
  at::Tensor target = input.sum(1, true);
  Result result;
  for (int step = 0; step < 50; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = (model.forward(input) - target).pow(2).mean();
    loss.backward();
    optimizer.step();
    (step == 0 ? result.first_loss : result.last_loss) = loss.item<float>();
  }
  result.weight = net->weight.detach().clone();
  group->shutdown();
  return result;
}

}  // namespace

int main() {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Result results[kWorldSize];
  std::thread other([&] { results[1] = train(1, store); });
  results[0] = train(0, store);
  other.join();
  bool equal = at::equal(results[0].weight, results[1].weight);
  bool learned = results[0].last_loss < results[0].first_loss / 10;
  std::cout << "weights equal: " << equal << ", loss " << results[0].first_loss << " -> "
            << results[0].last_loss << "\n";
  return equal && learned ? 0 : 1;
}
