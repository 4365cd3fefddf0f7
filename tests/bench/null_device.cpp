// An accelerator that does nothing in no time, and an NCCL that does nothing: what is left of a
// collective is libddp's own host time. For tests/bench/enqueue.py, which loads it.

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <optional>

#include "libddp/cuda/nccl_api.h"

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice{kType, 0};

thread_local c10::StreamId current_stream = 0;

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, 1);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(kDevice);
    current_stream = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  /// Not an override: torch 2.11 has none.
  virtual bool isStreamCapturing(const c10::Stream&) const { return false; }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    static int any = 0;
    *event = &any;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

class HostMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = std::malloc(bytes);
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

HostMemory memory;
REGISTER_ALLOCATOR(kType, &memory)

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("empty.memory_format", empty); }

template <typename... Arguments>
ncclResult_t succeed(Arguments...) {
  return ncclSuccess;
}

ncclResult_t init(ncclComm_t* comm, int, int, int, ncclUniqueId*, ncclConfig_t*) {
  static int any = 0;
  *comm = reinterpret_cast<ncclComm_t>(&any);
  return ncclSuccess;
}

ncclResult_t no_error(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

}  // namespace

extern "C" void libddp_null_device_install() {
  static libddp::NcclApi api{.version = NCCL_VERSION_CODE,
                             .path = "null",
                             .get_unique_id = succeed,
                             .comm_init_rank_scalable = init,
                             .comm_destroy = succeed,
                             .comm_abort = succeed,
                             .comm_get_async_error = no_error,
                             .group_start = succeed,
                             .group_end = succeed,
                             .all_reduce = succeed,
                             .broadcast = succeed,
                             .all_gather = succeed,
                             .reduce_scatter = succeed};
  libddp::NcclApi::install(&api);
}
