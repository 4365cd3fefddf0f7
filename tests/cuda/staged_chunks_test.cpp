// The bytes of a snapshot on their way from devices: right, in order with what computes them, and
// through little memory of the host.

#include "libddp/snapshot/staged_chunks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstring>
#include <future>
#include <memory>
#include <vector>

#include "libddp/kernels/crc32c.h"
#include "libddp/slots/chunk_threads.h"
#include "tests/cuda/chunk_tensors.h"
#include "tests/cuda/device_fixture.h"
#include "tests/cuda/memory_peak.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

using fakegpu::device_at;

std::vector<std::byte> bytes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::byte> bytes;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor host = tensor.resolve_conj().contiguous();
    const auto* const data = static_cast<const std::byte*>(host.const_data_ptr());
    bytes.insert(bytes.end(), data, data + host.nbytes());
  }
  return bytes;
}

/// All chunks from `first` on.
void check_copies(StagedChunks& chunks, const std::vector<std::byte>& wanted, int num_threads,
                  std::size_t first = 0) {
  REQUIRE(chunks.total() == wanted.size());
  const std::size_t count = num_chunks(wanted.size());
  std::vector<std::byte> copied(wanted.size());
  std::vector<std::uint32_t> sums(count);
  for_each_chunk(count - first, num_threads, [&](std::size_t i) {
    sums[first + i] = chunks.copy(first + i, copied.data() + (first + i) * kChunkBytes);
  });
  for (std::size_t i = first; i < count; ++i) {
    const std::byte* const chunk = wanted.data() + i * kChunkBytes;
    const std::size_t size = chunk_bytes(wanted.size(), i);
    INFO("chunk " << i);
    REQUIRE(std::memcmp(copied.data() + i * kChunkBytes, chunk, size) == 0);
    REQUIRE(sums[i] == crc32c(chunk, size));
  }
}

}  // namespace

TEST_CASE("chunks of tensors on devices and on the CPU", "[nccl][snapshot]") {
  fakegpu::reset();
  // More chunks than places, pieces that end within chunks, and chunks of many pieces.
  const std::vector<at::Tensor> host = {random_bytes(9 * kChunk + 5),
                                        random_bytes(3),
                                        random_bytes(kChunk - 8),
                                        random_bytes(0),
                                        random_bytes(17),
                                        random_bytes(11 * kChunk)};
  std::vector<at::Tensor> tensors = host;
  for (const int on_device : {0, 1, 3, 5}) tensors[on_device] = host[on_device].to(device_at(0));
  for (const int num_threads : {1, 3, 40}) {
    StagedChunks chunks(tensors);
    check_copies(chunks, bytes_of(host), num_threads);
  }
  CHECK(races_text() == "");
}

TEST_CASE("chunks of two devices, of strided and of conjugate tensors", "[nccl][snapshot]") {
  fakegpu::reset();
  const at::Tensor strided = at::arange(600, at::kFloat).reshape({20, 30}).t();
  const at::Tensor complex = at::full({7}, c10::complex<double>(1, 2), at::kComplexDouble).conj();
  const std::vector<at::Tensor> host = {strided, random_bytes(kChunk), complex, random_bytes(5)};
  std::vector<at::Tensor> tensors = host;
  tensors[0] = strided.t().contiguous().to(device_at(0)).t();
  tensors[1] = host[1].to(device_at(1));
  tensors[3] = host[3].to(device_at(0));
  REQUIRE_FALSE(tensors[0].is_contiguous());
  StagedChunks chunks(tensors);
  check_copies(chunks, bytes_of(host), 2);
  CHECK(races_text() == "");
}

TEST_CASE("tensors that are not dense are copied one at a time", "[snapshot]") {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 8; ++i) tensors.push_back(random_bytes(3 * kChunk).reshape({-1, 4}).t());
  const std::vector<std::byte> wanted = bytes_of(tensors);
  for (const std::size_t first : {0, 10}) {
    const auto memory = std::make_shared<MemoryPeak>();
    const c10::DebugInfoGuard counted(c10::DebugInfoKind::PROFILER_STATE, memory);
    StagedChunks chunks(tensors, first);
    check_copies(chunks, wanted, 1, first);
    CHECK(memory->peak() < 4 * kChunk);
    CHECK(memory->now() == 0);
  }
  StagedChunks chunks(tensors);
  check_copies(chunks, wanted, 4);
}

TEST_CASE("chunks from one in the middle on, and none at all", "[nccl][snapshot]") {
  const std::vector<at::Tensor> host = {random_bytes(20 * kChunk + 1)};
  const std::vector<at::Tensor> tensors = {host[0].to(device_at(0))};
  for (const std::size_t first : {1, 18, 20}) {
    StagedChunks chunks(tensors, first);
    check_copies(chunks, bytes_of(host), 2, first);
  }
  // Left alone with chunks on their way.
  { const StagedChunks unread(tensors); }
  CHECK(StagedChunks({}).total() == 0);
  CHECK(StagedChunks({at::empty({0}, at::TensorOptions().device(device_at(0)))}).total() == 0);
}

TEST_CASE("chunks come behind what computes them, and what follows waits for nothing",
          "[nccl][snapshot][streams]") {
  fakegpu::reset();
  const c10::Device device = device_at(0);
  const at::Tensor tensor = at::zeros({kChunk}, bytes_on(device));
  tensor.fill_(7);
  StagedChunks chunks({tensor});
  check_copies(chunks, std::vector<std::byte>(kChunk, std::byte{7}), 1);
  CHECK(races_text() == "");

  // A save whose copies do not wait for the current stream is seen.
  tensor.fill_(8);
  fakegpu::reset();
  tensor.fill_(9);
  fakegpu::ignore_wait(1);
  {
    StagedChunks early({tensor});
    check_copies(early, std::vector<std::byte>(kChunk, std::byte{9}), 1);
  }
  CHECK(races_text() != "");
  fakegpu::reset();
}

TEST_CASE("the host waits for each chunk before it reads it", "[nccl][snapshot]") {
  const at::Tensor host = random_bytes(20 * kChunk);
  const at::Tensor tensor = host.to(device_at(0));
  fakegpu::reset();
  StagedChunks chunks({tensor});
  CHECK(fakegpu::num_host_waits(0) == 0);
  check_copies(chunks, bytes_of({host}), 1);
  CHECK(fakegpu::num_host_waits(0) == 20);
}

TEST_CASE("an error of the device ends all threads that wait for chunks", "[nccl][snapshot]") {
  const at::Tensor tensor = random_bytes(40 * kChunk).to(device_at(0));
  StagedChunks chunks({tensor});
  std::vector<std::byte> first(kChunk);
  std::vector<std::byte> later(kChunk);
  // Its place is that of the first chunk, behind which it is brought.
  std::future<void> waits = std::async(std::launch::async, [&] { chunks.copy(16, later.data()); });
  {
    // A thread to which the device has no operators.
    const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::PrivateUse1);
    CHECK_THROWS_AS(chunks.copy(0, first.data()), c10::Error);
  }
  CHECK_THROWS_AS(waits.get(), c10::Error);
  CHECK_THROWS_AS(chunks.copy(1, first.data()), c10::Error);
}
