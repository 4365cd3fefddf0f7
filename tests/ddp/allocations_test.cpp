// In steady state a step takes no memory for gradients or buckets from the heap, and what it takes
// for its bookkeeping does not grow with the number of parameters.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cstdlib>
#include <new>

#include "libddp/ddp/reducer.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace {

thread_local long num_taken = 0;

}  // namespace

// noinline: g++ would otherwise pair an inlined malloc with a delete that it does not see through.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  ++num_taken;
  if (void* block = std::malloc(bytes == 0 ? 1 : bytes)) return block;
  throw std::bad_alloc();
}
__attribute__((noinline)) void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++num_taken;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
__attribute__((noinline)) void operator delete(void* block) noexcept { std::free(block); }
__attribute__((noinline)) void operator delete(void* block, std::size_t) noexcept {
  std::free(block);
}

namespace libddp {
namespace {

using test::expect;
using test::with_groups;

NamedTensors leaves(int n) {
  NamedTensors parameters;
  for (int i = 0; i < n; ++i) {
    parameters.push_back({fmt::format("p{}", i), at::full({16}, 1.0).set_requires_grad(true)});
  }
  return parameters;
}

/// What this thread takes from the heap in one step; `reducer` may be null.
long taken_by_step(const NamedTensors& parameters, Reducer* reducer) {
  for (const auto& [name, tensor] : parameters) tensor.mutable_grad() = at::Tensor();
  const long before = num_taken;
  at::Tensor loss = at::zeros({});
  for (const auto& [name, tensor] : parameters) loss = loss + tensor.sum();
  if (reducer != nullptr) reducer->prepare_for_backward({loss});
  loss.backward();
  return num_taken - before;
}

long steady(const NamedTensors& parameters, Reducer* reducer) {
  for (int step = 0; step < 5; ++step) taken_by_step(parameters, reducer);
  return taken_by_step(parameters, reducer);
}

/// What a step takes beyond the same step without a reducer; all parameters in one bucket.
long extra(const Group& group, int num_parameters) {
  const NamedTensors plain = leaves(num_parameters);
  const long bare = steady(plain, nullptr);
  const NamedTensors wrapped = leaves(num_parameters);
  const auto reducer = Reducer::create(wrapped, group, {});
  return steady(wrapped, reducer.get()) - bare;
}

TEST_CASE("the heap's part in a step does not grow with the parameters", "[allocations]") {
  with_groups(2, [](const Group& group) {
    const long few = extra(group, 10);
    const long many = extra(group, 200);
    expect(few == many, fmt::format("{} for 10 parameters, {} for 200", few, many));
    expect(few <= 12, fmt::format("{} for a whole step", few));
  });
}

}  // namespace
}  // namespace libddp
