#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <cstdint>

#include "tests/fakegpu/with_device.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace fakegpu::test {
namespace {

at::Tensor moved(const at::Tensor& tensor) { return tensor.to(device_at(0)); }

bool is_same(const at::Tensor& on_device, const at::Tensor& on_cpu) {
  return on_device.device() == device_at(0) && at::equal(on_device.cpu(), on_cpu);
}

TEST_CASE_METHOD(WithDevice, "operators give what the CPU's give") {
  const at::Tensor a = at::randn({4, 6});
  const at::Tensor b = at::randn({6, 3});
  REQUIRE(is_same(at::matmul(moved(a), moved(b)), at::matmul(a, b)));
  REQUIRE(is_same(moved(a) + 1, a + 1));
  REQUIRE(is_same(moved(a).t().contiguous(), a.t().contiguous()));
  REQUIRE(is_same(at::cat({moved(a), moved(a)}, 1), at::cat({a, a}, 1)));
  REQUIRE(is_same(moved(a).to(at::kBFloat16), a.to(at::kBFloat16)));
  REQUIRE(is_same(at::softmax(moved(a), 1), at::softmax(a, 1)));
  REQUIRE(is_same(std::get<1>(moved(a).max(1)), std::get<1>(a.max(1))));
  REQUIRE(is_same(moved(a).index({moved(at::tensor({0, 2}))}), a.index({at::tensor({0, 2})})));
  REQUIRE(is_same(at::nonzero(moved(a)), at::nonzero(a)));
  REQUIRE(at::equal(moved(a), moved(a)));
  REQUIRE(moved(a).sum().item<float>() == a.sum().item<float>());
}

TEST_CASE_METHOD(WithDevice, "tensors lie at multiples of 512 bytes") {
  for (const std::int64_t count : {1, 100, 1000})
    REQUIRE(reinterpret_cast<std::uintptr_t>(at::empty({count}, on_device()).data_ptr()) % 512 ==
            0);
}

TEST_CASE_METHOD(WithDevice, "views share memory") {
  const at::Tensor x = at::zeros({4, 6}, on_device());
  const std::vector<at::Tensor> parts = x.split(2);
  parts[1].fill_(1);
  x.view({24}).narrow(0, 0, 3).add_(2);
  x.select(1, 5).mul_(7);
  REQUIRE(parts[0].is_alias_of(x));
  REQUIRE(parts[0].data_ptr() == x.data_ptr());
  at::Tensor expected = at::zeros({4, 6});
  expected.narrow(0, 2, 2).fill_(1);
  expected.view({24}).narrow(0, 0, 3).add_(2);
  expected.select(1, 5).mul_(7);
  REQUIRE(is_same(x, expected));
  const at::Tensor complex = at::view_as_complex(at::ones({3, 2}, on_device()));
  REQUIRE(complex.dtype() == at::kComplexFloat);
  REQUIRE(at::view_as_real(complex).data_ptr() == complex.data_ptr());
}

TEST_CASE_METHOD(WithDevice, "operators in place and into results keep their tensors") {
  at::Tensor x = at::ones({4}, on_device());
  const void* const place = x.data_ptr();
  REQUIRE(x.add_(1).is_same(x));
  REQUIRE(x.data_ptr() == place);
  at::Tensor out = at::empty({0}, on_device());
  at::add_out(out, x, x);
  REQUIRE(is_same(out, at::full({4}, 4.0f)));
  at::_foreach_add_({x, out}, 1);
  REQUIRE(is_same(x, at::full({4}, 3.0f)));
  REQUIRE(is_same(out, at::full({4}, 5.0f)));
}

TEST_CASE_METHOD(WithDevice, "convolutions have a forward and a backward") {
  const at::Tensor x = at::randn({2, 3, 6, 6}).requires_grad_(true);
  const at::Tensor w = at::randn({4, 3, 3, 3}).requires_grad_(true);
  const at::Tensor b = at::randn({4}).requires_grad_(true);
  const auto moved_leaf = [](const at::Tensor& leaf) {
    return moved(leaf.detach()).requires_grad_(true);
  };
  const at::Tensor on_x = moved_leaf(x);
  const at::Tensor on_w = moved_leaf(w);
  const at::Tensor on_b = moved_leaf(b);
  at::conv2d(x, w, b).pow(2).sum().backward();
  at::conv2d(on_x, on_w, on_b).pow(2).sum().backward();
  REQUIRE(at::allclose(on_x.grad().cpu(), x.grad()));
  REQUIRE(at::allclose(on_w.grad().cpu(), w.grad()));
  REQUIRE(at::allclose(on_b.grad().cpu(), b.grad()));
}

TEST_CASE_METHOD(WithDevice, "SyncBatchNorm's operators make a batch norm") {
  const at::Tensor x = at::randn({6, 3, 4});
  const at::Tensor grad = at::randn({6, 3, 4});
  const at::Tensor weight = at::randn({3});
  at::Tensor reference = x.clone().requires_grad_(true);
  const at::Tensor running_var = at::ones({3});
  const at::Tensor y =
      at::batch_norm(reference, weight, {}, at::zeros({3}), running_var, true, 0.1, 1e-5, false);
  y.backward(grad);
  std::vector<at::Tensor> means;
  std::vector<at::Tensor> invstds;
  for (const auto& part : moved(x).split(3)) {
    const auto [mean, invstd] = at::batch_norm_stats(part, 1e-5);
    means.push_back(mean);
    invstds.push_back(invstd);
  }
  const at::Tensor counts = at::full({2}, 12.0f, on_device());
  const at::Tensor on_var = at::ones({3}, on_device());
  const auto [mean, invstd] = at::batch_norm_gather_stats_with_counts(
      moved(x), at::stack(means), at::stack(invstds), {}, on_var, 0.1, 1e-5, counts);
  const at::Tensor on_y = at::batch_norm_elemt(moved(x), moved(weight), {}, mean, invstd, 1e-5);
  REQUIRE(at::allclose(on_y.cpu(), y, 1e-4, 1e-5));
  REQUIRE(at::allclose(on_var.cpu(), running_var, 1e-4));
  const auto [sum, sum_centred, grad_weight, grad_bias] = at::batch_norm_backward_reduce(
      moved(grad), moved(x), mean, invstd, moved(weight), true, true, true);
  const at::Tensor on_grad = at::batch_norm_backward_elemt(moved(grad), moved(x), mean, invstd,
                                                           moved(weight), sum, sum_centred, counts);
  REQUIRE(at::allclose(on_grad.cpu(), reference.grad(), 1e-3, 1e-5));
  REQUIRE(at::allclose(grad_bias.cpu(), grad.sum(at::IntArrayRef({0, 2})), 1e-4, 1e-5));
  REQUIRE(grad_weight.numel() == 3);
}

TEST_CASE_METHOD(WithDevice, "tensors of several devices are refused, numbers are not") {
  at::Tensor x = at::ones({4}, on_device());
  for (const at::Tensor& other : {at::ones({4}, on_device(1)), at::ones({4})}) {
    const std::string text = libddp::test::message_of<c10::Error>([&] { x.add_(other); });
    REQUIRE(libddp::test::contains(text, "same device"));
  }
  REQUIRE(is_same(x.add_(at::scalar_tensor(2)), at::full({4}, 3.0f)));
  REQUIRE(x.index({at::tensor({0, 2})}).numel() == 2);
}

TEST_CASE_METHOD(WithDevice, "operations and waits of the host are counted") {
  at::Tensor x = at::ones({4}, on_device());
  x.add_(1);
  REQUIRE(num_operations(0) == 2);
  REQUIRE(num_host_waits(0) == 0);
  REQUIRE(x.sum().item<float>() == 8);
  REQUIRE(num_host_waits(0) == 1);
  default_stream().synchronize();
  REQUIRE(num_host_waits(0) == 2);
  REQUIRE(at::nonzero(x).numel() == 4);
  REQUIRE(num_host_waits(0) == 3);
  REQUIRE(num_host_waits(1) == 0);
}

TEST_CASE_METHOD(WithDevice, "storages can be resized and exchanged") {
  at::Tensor x = moved(at::arange(4));
  x.resize_({8});
  REQUIRE(is_same(x.narrow(0, 0, 4), at::arange(4)));
  at::Tensor y = at::empty({0}, on_device().dtype(at::kLong));
  y.set_(x.storage(), 2, {2}, {1});
  REQUIRE(is_same(y, at::arange(4).narrow(0, 2, 2)));
  x.set_();
  REQUIRE(x.numel() == 0);
}

TEST_CASE_METHOD(WithDevice, "random numbers come from the device's generator") {
  at::Generator generator = at::globalContext().defaultGenerator(device_at(0));
  const at::Tensor cpu_state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  generator.set_current_seed(7);
  const at::Tensor state = generator.get_state();
  REQUIRE(state.numel() == 16);
  const at::Tensor first = at::randn({100}, on_device());
  const at::Tensor dropped = at::dropout(first, 0.5, true);
  REQUIRE_FALSE(at::equal(first, at::randn({100}, on_device())));
  generator.set_state(state);
  REQUIRE(at::equal(first, at::randn({100}, on_device())));
  REQUIRE(at::equal(dropped, at::dropout(first, 0.5, true)));
  REQUIRE(at::equal(cpu_state, at::globalContext().defaultGenerator(at::kCPU).get_state()));
  REQUIRE_THROWS(generator.set_state(at::zeros({3}, at::kByte)));
}

TEST_CASE_METHOD(WithDevice, "pinned memory is known again") {
  const at::Tensor pinned = at::ones({4}).pin_memory();
  REQUIRE(pinned.is_pinned());
  REQUIRE(pinned.narrow(0, 1, 2).is_pinned());
  REQUIRE_FALSE(at::ones({4}).is_pinned());
}

TEST_CASE_METHOD(WithDevice, "memory is counted, and can run out") {
  const MemoryUse before = memory_use(2);
  {
    const at::Tensor x = at::empty({1000}, on_device(2));
    REQUIRE(memory_use(2).allocated_bytes == before.allocated_bytes + 4096);
    REQUIRE(memory_use(2).num_allocations == before.num_allocations + 1);
  }
  REQUIRE(memory_use(2).allocated_bytes == before.allocated_bytes);
  set_memory_limit(2, before.allocated_bytes + 512);
  REQUIRE_THROWS_AS(at::empty({1000}, on_device(2)), c10::OutOfMemoryError);
  set_memory_limit(2, -1);
  REQUIRE(at::empty({1000}, on_device(2)).numel() == 1000);
}

TEST_CASE_METHOD(WithDevice, "backward runs on the streams of the forward") {
  at::Tensor w = moved(at::randn({4, 4}));
  w.requires_grad_(true);
  const c10::Stream side = new_stream();
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(default_stream());
  event.block(side);
  at::Tensor loss;
  c10::Stream seen = default_stream();
  {
    const c10::StreamGuard on_side(side);
    const at::Tensor y = at::matmul(w, w);
    y.register_hook([&](const at::Tensor&) { seen = guard().getStream(device_at(0)); });
    loss = y.sum();
    loss.backward();
  }
  REQUIRE(seen == side);
  event.record(side);
  event.block(default_stream());
  at::Tensor reference = w.detach().cpu().requires_grad_(true);
  at::matmul(reference, reference).sum().backward();
  REQUIRE(at::allclose(w.grad().cpu(), reference.grad()));
  REQUIRE(race_texts() == std::vector<std::string>{});
}

}  // namespace
}  // namespace fakegpu::test
