// 8-bit floats: moved always, added where NCCL and the device can.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

const std::vector<at::ScalarType> kFloat8 = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};

at::Tensor float8(double value, c10::Device device, at::ScalarType type) {
  return device_tensor(value, device).to(type);
}

double first_of(const at::Tensor& tensor) { return first(tensor.to(at::kFloat).cpu()); }

void move(ProcessGroup& group, c10::Device device, at::ScalarType type) {
  const int rank = group.rank();
  at::Tensor tensor = float8(1 + rank, device, type);
  group.broadcast(tensor, 1);
  expect(first_of(tensor) == 2, "broadcast");
  at::Tensor all = at::empty({32}, tensor.options());
  group.all_gather_into(all, float8(1 + rank, device, type));
  expect(first_of(all) == 1 && first_of(all.slice(0, 16)) == 2, "all_gather_into");
  at::Tensor received = at::zeros({16}, tensor.options());
  if (rank == 0) group.send(float8(3, device, type), 1);
  if (rank == 1) group.recv(received, 0);
  if (rank == 1) expect(first_of(received) == 3, "send");
}

}  // namespace

TEST_CASE("8-bit floats are added by NCCL in their own type", "[nccl][float8]") {
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    for (const at::ScalarType type : kFloat8) {
      at::Tensor tensor = float8(1.5 + group.rank(), device, type);
      group.all_reduce(tensor);
      expect(first_of(tensor) == 4, "the sum");
      group.all_reduce(tensor, {.op = ReduceOp::Avg});
      expect(first_of(tensor) == 4, "the average");
      at::Tensor block = at::empty({8}, tensor.options());
      group.reduce_scatter_into(block, tensor, {.op = ReduceOp::Max});
      expect(first_of(block) == 4, "a block of maxima");
      move(group, device, type);
    }
  });
  bool is_typed = false;
  for (const mock_nccl::Issued& call : mock_nccl::issued()) {
    const bool is_reduction = call.function == "all_reduce" || call.function == "reduce_scatter";
    const bool is_float8 = call.dtype == ncclFloat8e4m3 || call.dtype == ncclFloat8e5m2;
    // Every NCCL moves bytes.
    REQUIRE(is_float8 == is_reduction);
    is_typed |= is_float8;
  }
  REQUIRE(is_typed);
}

TEST_CASE("what NCCL cannot do with 8-bit floats is refused, and they are moved",
          "[nccl][float8]") {
  mock_nccl::set_version(NCCL_VERSION(2, 23, 4));
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    for (const at::ScalarType type : kFloat8) {
      at::Tensor tensor = float8(1, device, type);
      const std::string old = message_of<ArgumentError>([&] { group.all_reduce(tensor); });
      for (const char* const part :
           {"NCCL 2.23.4 does not reduce float8_e", "needs 2.24.0", "bfloat16"}) {
        expect(contains(old, part), old);
      }
      move(group, device, type);
    }
  });
  mock_nccl::set_version(NCCL_VERSION_CODE);
  run_device_group(2, [](ProcessGroup& group, c10::Device device) {
    at::Tensor tensor = float8(1, device, at::kFloat8_e5m2);
    const std::string scaled =
        message_of<ArgumentError>([&] { group.all_reduce(tensor, {.scale = 0.5}); });
    expect(contains(scaled, "does not scale float8_e5m2 (scale=0.5)"), scaled);
  });
}
