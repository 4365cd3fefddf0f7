// Bytes on their way into device tensors: to the right place, in order with what uses these, and
// only where their chunk is sound.

#include "libddp/snapshot/staged_targets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/scatter.h"
#include "tests/cuda/chunk_tensors.h"
#include "tests/cuda/device_fixture.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

using fakegpu::device_at;

/// One tensor of bytes, as it was stored.
class Stored final : public ChunkSource {
 public:
  explicit Stored(at::Tensor tensor)
      : tensor_(std::move(tensor)),
        layout_(PieceLayout::of({{.key = "w",
                                  .dtype = "U8",
                                  .shape = {tensor_.numel()},
                                  .begin = 0,
                                  .end = tensor_.numel()}})) {}

  const PieceLayout& layout() const override { return layout_; }
  std::uint32_t checksum(std::size_t index) const override {
    const auto bytes = at(index);
    return crc32c(bytes.data(), bytes.size()) + (index == damaged ? 1 : 0);
  }
  std::span<const std::byte> chunk(std::size_t index, std::vector<std::byte>&) const override {
    return at(index);
  }
  std::string name() const override { return "what was stored"; }

  /// Number of a chunk that has another checksum.
  std::size_t damaged = static_cast<std::size_t>(-1);

 private:
  std::span<const std::byte> at(std::size_t index) const {
    const auto* const data = static_cast<const std::byte*>(tensor_.const_data_ptr());
    return {data + index * kChunkBytes, chunk_bytes(tensor_.nbytes(), index)};
  }

  const at::Tensor tensor_;
  const PieceLayout layout_;
};

}  // namespace

TEST_CASE("chunks go into tensors of devices and of the CPU", "[nccl][snapshot]") {
  const std::int64_t count = 22 * kChunk + 100;
  const at::Tensor bytes = random_bytes(count);
  const Stored stored(bytes);
  for (const int num_threads : {1, 3, 40}) {
    fakegpu::reset();
    const at::Tensor first = at::zeros({17 * kChunk + 3}, bytes_on(device_at(0)));
    const at::Tensor on_host = at::zeros({500}, bytes_on(at::kCPU));
    const at::Tensor other = at::zeros({2 * kChunk}, bytes_on(device_at(1)));
    const at::Tensor last = at::zeros({50}, bytes_on(device_at(0)));
    StagedTargets memory;
    std::vector<Segment> segments;
    std::uint64_t offset = 0;
    for (const at::Tensor& tensor : {first, on_host, other, last}) {
      std::byte* const to =
          tensor.is_cpu() ? static_cast<std::byte*>(tensor.mutable_data_ptr()) : memory.add(tensor);
      segments.push_back({.offset = offset, .bytes = tensor.nbytes(), .to = to});
      offset += tensor.nbytes() + 7;  // and some that nobody wants
    }
    memory.begin();
    scatter(stored, segments, num_threads, &memory);
    memory.finish();
    for (std::size_t i = 0; const at::Tensor& tensor : {first, on_host, other, last}) {
      const auto begin = static_cast<std::int64_t>(segments[i++].offset);
      CHECK(tensor.cpu().equal(bytes.slice(0, begin, begin + tensor.numel())));
    }
    CHECK(races_text() == "");
  }
}

TEST_CASE("tensors that overlap are one memory", "[nccl][snapshot]") {
  const at::Tensor bytes = random_bytes(300);
  const at::Tensor whole = at::zeros({100}, bytes_on(device_at(0)));
  const at::Tensor alone = at::zeros({100}, bytes_on(device_at(0)));
  StagedTargets memory;
  std::byte* const part = memory.add(whole.slice(0, 10, 20));
  std::byte* const begin = memory.add(whole);
  std::byte* const end = memory.add(whole.slice(0, 90, 100));
  std::byte* const other = memory.add(alone);
  CHECK(memory.add(at::empty({0}, bytes_on(device_at(0)))) == nullptr);
  CHECK(part == begin + 10);
  CHECK(end == begin + 90);
  for (const int inside : {0, 9, 10, 50, 99}) CHECK(memory.has(begin + inside));
  CHECK_FALSE(memory.has(begin - 1));
  CHECK_FALSE(memory.has(static_cast<const std::byte*>(bytes.const_data_ptr())));
  memory.begin();
  scatter(Stored(bytes),
          {{.offset = 0, .bytes = 50, .to = begin + 50},
           {.offset = 50, .bytes = 50, .to = begin},
           {.offset = 200, .bytes = 100, .to = other}},
          1, &memory);
  memory.finish();
  CHECK(whole.cpu().slice(0, 50).equal(bytes.slice(0, 0, 50)));
  CHECK(whole.cpu().slice(0, 0, 50).equal(bytes.slice(0, 50, 100)));
  CHECK(alone.cpu().equal(bytes.slice(0, 200)));
}

TEST_CASE("a damaged chunk does not reach the device", "[nccl][snapshot]") {
  const at::Tensor bytes = random_bytes(3 * kChunk);
  const at::Tensor tensor = at::zeros({3 * kChunk}, bytes_on(device_at(0)));
  Stored stored(bytes);
  stored.damaged = 1;
  {
    StagedTargets memory;
    const std::vector<Segment> all{
        {.offset = 0, .bytes = 3 * kChunkBytes, .to = memory.add(tensor)}};
    memory.begin();
    CHECK_THROWS_AS(scatter(stored, all, 1, &memory), SnapshotError);
  }
  const at::Tensor found = tensor.cpu();
  CHECK(found.slice(0, 0, kChunk).equal(bytes.slice(0, 0, kChunk)));
  CHECK(found.slice(0, kChunk, 2 * kChunk).count_nonzero().item<std::int64_t>() == 0);
}

TEST_CASE("a load comes behind what uses the tensors, and is there when it returns",
          "[nccl][snapshot][streams]") {
  const std::int64_t count = 20 * kChunk;
  const at::Tensor bytes = random_bytes(count);
  const Stored stored(bytes);
  const at::Tensor tensor = at::zeros({count}, bytes_on(device_at(0)));
  for (const bool waits : {true, false}) {
    fakegpu::reset();
    tensor.fill_(1);
    if (!waits) fakegpu::ignore_wait(1, 0);
    StagedTargets memory;
    const std::vector<Segment> all{
        {.offset = 0, .bytes = tensor.nbytes(), .to = memory.add(tensor)}};
    memory.begin();
    scatter(stored, all, 1, &memory);
    // A place is used again only when what was in it has been copied.
    CHECK(fakegpu::num_host_waits(0) == 4);
    memory.finish();
    tensor.add_(1);  // on the current stream: the host has waited
    CHECK((races_text() == "") == waits);
  }
  fakegpu::reset();
}
