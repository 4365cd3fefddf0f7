// Another library's backend for device tensors under libddp's group: it is ordered by streams, as
// our own is.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "libddp/interop/c10d_backend.h"
#include "libddp/interop/from_c10d.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// libddp's own backend under a name that libddp does not know.
class OtherNccl final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Handle = c10::intrusive_ptr<c10d::Work>;

  explicit OtherNccl(c10::intrusive_ptr<C10dBackend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "nccl-of-tests"; }
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return inner_->allreduce(tensors, options);
  }
  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  Handle _allgather_base(at::Tensor& output, at::Tensor& input,
                         const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(output, input, options);
  }
  Handle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& options) override {
    return inner_->_reduce_scatter_base(output, input, options);
  }

 private:
  const c10::intrusive_ptr<C10dBackend> inner_;
};

}  // namespace

TEST_CASE("another library's operations on devices are ordered by streams", "[nccl][interop]") {
  mock_nccl::reset();
  mock_nccl::install();
  fakegpu::reset();
  // One that was given up while it began (failures_test.cpp) is left behind for good.
  const int before = mock_nccl::live().communicators;
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](int rank) {
    const c10::Device device = fakegpu::device_at(rank);
    const c10::DeviceGuard guard(device);
    auto inner = C10dBackend::create(store, {.rank = rank, .world_size = 2});
    const Group group =
        from_c10d(c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<OtherNccl>(inner)));
    expect(group->moves(device.type()) && !group->moves(c10::kCPU), "device tensors only");
    for (const bool async : {false, true}) {
      const CallOptions options{.async = async};
      at::Tensor sum = device_tensor(rank + 1, device);
      WorkPtr work = group->all_reduce(sum, {.op = ReduceOp::Avg, .scale = 2}, options);
      expect(work->is_stream_ordered(), "stream-ordered");
      work->wait();
      sum.add_(1);
      at::Tensor all = at::empty({32}, sum.options());
      group->all_gather_into(all, sum, options)->wait();
      at::Tensor part = at::empty({16}, sum.options());
      group->reduce_scatter_into(part, all, {}, options)->wait();
      expect(first(part.cpu()) == 8, "twice the average of 1 and 2, and 1, summed");
      // Not contiguous: copied back behind the operation.
      at::Tensor turned = device_tensor(rank, device).view({4, 4}).t();
      group->broadcast(turned, 1, options)->wait();
      expect(turned.cpu()[0][0].item<float>() == 1, "broadcast");
    }
    std::atomic<bool> is_called{false};
    group->all_reduce(device_tensor(1, device), {}, kAsync)->on_complete([&](Work&) {
      is_called = true;
    });
    group->shutdown();
    expect(is_called, "a shutdown waits for callbacks");
    inner->shutdown();
  });
  REQUIRE(races_text() == "");
  REQUIRE(mock_nccl::live().communicators == before);
}
