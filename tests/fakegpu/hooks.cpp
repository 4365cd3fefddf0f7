// What generic code of torch asks an accelerator for. Registered when the library is loaded.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "tests/fakegpu/device_allocator.h"
#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/generator.h"
#include "tests/fakegpu/pinned_allocator.h"
#include "tests/fakegpu/storage.h"

namespace fakegpu {
namespace {

const c10::impl::DeviceGuardImplInterface& guard() {
  return *c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    guard().setDevice(device_at(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice(device_at(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return Generator::default_of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device);
  }

  at::Device getDeviceFromPtr(void* data) const override {
    const c10::DeviceIndex device = DeviceAllocator::get().device_of(data);
    TORCH_CHECK(device >= 0, "fakegpu: ", data, " is not memory of this device");
    return device_at(device);
  }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::get().owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

[[maybe_unused]] const bool are_hooks_registered = [] {
  c10::register_privateuse1_backend("fakegpu");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace fakegpu
