#include "tests/support/torch_group_fixture.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/util/accumulate.h>

#include <sstream>
#include <stdexcept>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/temporary_folder.h"

namespace libddp::test {

void run_group(int world_size, const std::function<void(ProcessGroup&)>& f,
               std::chrono::milliseconds timeout) {
  run_group_on_hosts(std::vector<int>(static_cast<std::size_t>(world_size), 0), f, timeout);
}

void run_group_on_hosts(const std::vector<int>& host_of,
                        const std::function<void(ProcessGroup&)>& f,
                        std::chrono::milliseconds timeout) {
  at::set_num_threads(1);
  auto store = c10::make_intrusive<c10d::HashStore>();
  const int world_size = static_cast<int>(host_of.size());
  run_ranks(world_size, [&](int rank) {
    at::set_num_threads(1);
    const int host = host_of[static_cast<std::size_t>(rank)];
    Group group = ProcessGroup::create(store, {.rank = rank,
                                               .world_size = world_size,
                                               .name = "test",
                                               .timeout = timeout,
                                               .host_identity = "host " + std::to_string(host)});
    f(*group);
    group->shutdown();
  });
}

std::vector<RankResult> fork_group(int world_size, const std::function<std::string(Group)>& f,
                                   std::chrono::milliseconds timeout) {
  TemporaryFolder folder;
  return fork_ranks(world_size, [&](int rank) {
    at::set_num_threads(1);
    auto store = c10::make_intrusive<c10d::FileStore>(folder.path() + "/store", world_size);
    return f(ProcessGroup::create(
        store, {.rank = rank, .world_size = world_size, .name = "test", .timeout = timeout}));
  });
}

at::Tensor input_of(int rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::int64_t numel = c10::multiply_integers(sizes);
  at::Tensor values = at::arange(numel, at::kLong).add(rank * 3).remainder(5);
  if (dtype == at::kBool) return values.gt(2 - rank % 2).view(sizes);
  return values.add(1).to(dtype).view(sizes);
}

at::Tensor all_inputs(int world_size, at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<at::Tensor> inputs;
  const at::ScalarType wide = c10::isFloatingType(dtype) ? at::kDouble : at::kLong;
  for (int rank = 0; rank < world_size; ++rank) {
    inputs.push_back(input_of(rank, sizes, dtype).to(wide));
  }
  return at::stack(inputs);
}

at::Tensor reduced(int world_size, at::IntArrayRef sizes, at::ScalarType dtype, ReduceOp op) {
  const at::Tensor inputs = all_inputs(world_size, sizes, dtype);
  at::Tensor result = inputs[0].clone();
  for (int rank = 1; rank < world_size; ++rank) {
    const at::Tensor next = inputs[rank];
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg:
        result = result.add(next);
        break;
      case ReduceOp::Product:
        result = result.mul(next);
        break;
      case ReduceOp::Min:
        result = result.minimum(next);
        break;
      case ReduceOp::Max:
        result = result.maximum(next);
        break;
      case ReduceOp::Band:
        result = result.bitwise_and(next);
        break;
      case ReduceOp::Bor:
        result = result.bitwise_or(next);
        break;
      case ReduceOp::Bxor:
        result = result.bitwise_xor(next);
        break;
    }
  }
  // Low precision averages are rounded once from fp32, as the library does.
  if (op == ReduceOp::Avg) {
    if (dtype != at::kDouble) result = result.to(at::kFloat);
    result = result.div(world_size);
  }
  return result.to(dtype);
}

at::Tensor filled(double value, std::int64_t numel) { return at::full({numel}, value, at::kFloat); }

double first(const at::Tensor& tensor) { return tensor[0].item<float>(); }

void expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  if (actual.scalar_type() == expected.scalar_type() && actual.sizes() == expected.sizes() &&
      at::equal(actual, expected)) {
    return;
  }
  std::ostringstream text;
  text << "expected " << what << ": dtype " << actual.scalar_type() << " sizes " << actual.sizes()
       << ", wanted " << expected.scalar_type() << " " << expected.sizes();
  if (actual.numel() <= 16) text << "\n" << actual << "\nwanted\n" << expected;
  throw std::runtime_error(text.str());
}

}  // namespace libddp::test
