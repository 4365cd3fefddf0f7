#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>

#include <optional>
#include <thread>

#include "tests/fakegpu/with_device.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace fakegpu::test {
namespace {

using Texts = std::vector<std::string>;

/// `later` goes on behind what `earlier` has now.
void wait(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(earlier);
  event.block(later);
}

TEST_CASE_METHOD(WithDevice, "operators of one stream are ordered") {
  at::Tensor x = at::ones({64}, on_device());
  x.add_(1);
  x.mul_(x);
  REQUIRE(race_texts() == Texts{});
}

TEST_CASE_METHOD(WithDevice, "a write on another stream that nothing orders is a race") {
  at::Tensor x = at::ones({64}, on_device());
  const c10::Stream side = new_stream();
  {
    const c10::StreamGuard on_side(side);
    x.add_(1);
  }
  const std::vector<Race> found = races();
  REQUIRE(found.size() == 1);
  REQUIRE(found[0].first.name == "aten::fill_.Scalar");
  REQUIRE(found[0].first.stream == default_stream());
  REQUIRE(found[0].second.name == "aten::add.out");
  REQUIRE(found[0].second.stream == side);
  REQUIRE(found[0].block == x.data_ptr());
  REQUIRE(found[0].begin == 0);
  REQUIRE(found[0].end == 256);
  REQUIRE_FALSE(found[0].freed);
  REQUIRE(found[0].text().find("aten::fill_.Scalar #") == 0);
  REQUIRE(races().empty());
}

TEST_CASE_METHOD(WithDevice, "two reads are no race, neither are different bytes") {
  const at::Tensor x = at::ones({64}, on_device());
  const c10::Stream side = new_stream();
  wait(default_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    const at::Tensor read = x.narrow(0, 0, 32).add(1);
    REQUIRE(x.add(1).numel() == read.numel() * 2);
  }
  const at::Tensor read = x.add(1);
  REQUIRE(race_texts() == Texts{});
  wait(side, default_stream());
  wait(default_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    x.narrow(0, 0, 32).fill_(2);
  }
  x.narrow(0, 32, 32).fill_(3);
  at::Tensor matrix = x.view({8, 8});
  REQUIRE(race_texts() == Texts{});
  const at::Tensor other = matrix.narrow(1, 0, 4).sum();  // columns, of which the side wrote half
  REQUIRE(races().size() == 1);
}

TEST_CASE_METHOD(WithDevice, "columns do not overlap their neighbours") {
  const at::Tensor x = at::zeros({8, 8}, on_device());
  const c10::Stream side = new_stream();
  wait(default_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    x.narrow(1, 0, 4).fill_(1);
  }
  x.narrow(1, 4, 4).fill_(2);
  REQUIRE(race_texts() == Texts{});
}

/// x on the default stream, then on a side stream, then on the default stream again.
void there_and_back() {
  at::Tensor x = at::ones({8}, on_device());
  const c10::Stream side = new_stream();
  wait(default_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    x.add_(1);
  }
  wait(side, default_stream());
  x.add_(1);
}

TEST_CASE_METHOD(WithDevice, "without any one of the waits there is a race") {
  there_and_back();
  REQUIRE(num_waits() == 2);
  REQUIRE(num_waits(0) == 2);
  REQUIRE(num_waits(1) == 0);
  REQUIRE(redundant_waits(0).empty());
  REQUIRE(race_texts() == Texts{});
  for (int k = 1; k <= 2; ++k) {
    reset();
    ignore_wait(k);
    there_and_back();
    REQUIRE(races().size() == 1);
  }
  reset();
  ignore_wait(1, 1);  // another device's
  there_and_back();
  REQUIRE(race_texts() == Texts{});
}

TEST_CASE_METHOD(WithDevice, "a wait that orders nothing new is named") {
  const at::Tensor x = at::ones({8}, on_device());
  const c10::Stream side = new_stream();
  wait(default_stream(), side);
  wait(default_stream(), side);
  REQUIRE(redundant_waits(0) == std::vector<std::int64_t>{2});
}

TEST_CASE_METHOD(WithDevice, "the host orders by what it waited for") {
  const c10::Stream side = new_stream();
  const auto write_on_side = [&](const at::Tensor& x) {
    const c10::StreamGuard on_side(side);
    x.fill_(1);
  };
  const at::Tensor x = at::empty({8}, on_device());
  write_on_side(x);
  SECTION("a stream") { side.synchronize(); }
  SECTION("an event") {
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(side);
    event.synchronize();
  }
  SECTION("an event's query") {
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(side);
    while (!event.query()) std::this_thread::yield();
  }
  SECTION("the device") { guard().synchronizeDevice(0); }
  SECTION("a blocking copy on the stream") {
    const c10::StreamGuard on_side(side);
    REQUIRE(x.cpu().sum().item<float>() == 8);
  }
  SECTION("by another thread of the rank") {
    std::thread([&] { side.synchronize(); }).join();
  }
  x.add_(1);
  REQUIRE(race_texts() == Texts{});
}

TEST_CASE_METHOD(WithDevice, "a copy that does not block orders nothing") {
  const c10::Stream side = new_stream();
  const at::Tensor x = at::zeros({8}, on_device());
  const at::Tensor pinned = at::ones({8}).pin_memory();
  wait(default_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    x.copy_(pinned, true);
  }
  SECTION("of the device's tensor") { x.add_(1); }
  SECTION("of the pinned one") { pinned.copy_(at::zeros({8}, on_device()), true); }
  REQUIRE(races().size() == 1);
}

TEST_CASE_METHOD(WithDevice, "the host uses pinned memory when it has waited for the device") {
  const auto waits = GENERATE(false, true);
  const at::Tensor on_host = at::zeros({64}, at::TensorOptions().pinned_memory(true));
  REQUIRE(on_host.is_pinned());
  on_host.fill_(1);
  at::Tensor x = at::ones({64}, on_device());
  reset();
  const c10::Stream side = new_stream();
  wait(default_stream(), side);
  const auto copy = [&](const at::Tensor& to, const at::Tensor& from) {
    const c10::StreamGuard on_side(side);
    to.copy_(from, /*non_blocking=*/true);
    if (waits) guard().synchronizeStream(side);
  };
  // To the device: the host may read meanwhile, and not write.
  copy(x, on_host);
  REQUIRE(on_host.sum().item<float>() == 64);
  REQUIRE(race_texts() == Texts{});
  on_host.narrow(0, 8, 4).mul_(3);
  const std::vector<Race> written = races();
  REQUIRE(written.size() == (waits ? 0 : 1));
  if (!waits) {
    REQUIRE(written[0].block == on_host.data_ptr());
    REQUIRE(written[0].begin == 32);
    REQUIRE(written[0].end == 48);
    REQUIRE(libddp::test::contains(written[0].text(), "of the host"));
  }
  // From it: neither.
  copy(on_host, x);
  const at::Tensor sum = at::zeros({64}).add_(on_host);
  REQUIRE(race_texts().size() == (waits ? 0 : 1));
  // What is launched behind the host's use is ordered with it.
  guard().synchronizeStream(side);
  on_host.fill_(5);
  copy(x, on_host);
  REQUIRE(race_texts() == Texts{});
}

TEST_CASE_METHOD(WithDevice, "a wait of the host can be left out of what the checker knows") {
  const at::Tensor on_host = at::zeros({64}, at::TensorOptions().pinned_memory(true));
  const at::Tensor x = at::ones({64}, on_device());
  for (const std::int64_t ignored : {0, 1, 2}) {
    reset();
    ignore_host_wait(ignored, 0);
    on_host.copy_(x, /*non_blocking=*/true);
    guard().synchronizeStream(default_stream());
    on_host.add_(1);
    REQUIRE(num_host_waits(0) == 1);
    REQUIRE(races().size() == (ignored == 1 ? 1 : 0));
  }
}

TEST_CASE_METHOD(WithDevice, "copies between devices are ordered with both") {
  const at::Tensor there = at::ones({8}, on_device(1));
  const at::Tensor here = there.to(device_at(0));
  there.zero_();
  REQUIRE(here.cpu().sum().item<float>() == 8);
  REQUIRE(race_texts() == Texts{});
}

TEST_CASE_METHOD(WithDevice, "memory that goes back while another stream uses it is a race") {
  const c10::Stream side = new_stream();
  std::optional<at::Tensor> x = at::ones({1000}, on_device());
  wait(default_stream(), side);
  {
    const c10::StreamGuard on_side(side);
    x->add_(1);
  }
  SECTION("unless the allocator knows") { x->record_stream(side); }
  SECTION("unless its stream waits before the free") { wait(side, default_stream()); }
  SECTION("unless its stream waits before the next allocation") {
    x.reset();
    wait(side, default_stream());
  }
  SECTION("at the next allocation") {
    x.reset();
    REQUIRE(races().empty());
    const at::Tensor next = at::empty({8}, on_device());
    const std::vector<Race> found = races();
    REQUIRE(found.size() == 1);
    REQUIRE(found[0].freed);
    REQUIRE(found[0].first.stream == side);
    REQUIRE(found[0].text().find("may still use freed memory") != std::string::npos);
  }
  x.reset();
  const at::Tensor next = at::zeros({1000}, on_device());
  REQUIRE(race_texts() == Texts{});
}

TEST_CASE_METHOD(WithDevice, "memory that is used again keeps its history") {
  const void* place = nullptr;
  {
    const at::Tensor x = at::ones({12345}, on_device());
    place = x.data_ptr();
  }
  const at::Tensor again = at::empty({12345}, on_device());
  REQUIRE(again.data_ptr() == place);
  const c10::Stream side = new_stream();
  const c10::StreamGuard on_side(side);  // does not wait for the stream of the allocation
  again.fill_(2);
  REQUIRE(races().size() == 1);
}

}  // namespace
}  // namespace fakegpu::test
