#include "tests/fakegpu/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>

#include "tests/fakegpu/fake_device.h"

namespace fakegpu {
namespace {

/// What one operator draws at most in a thread, as torch counts for Philox.
constexpr std::uint64_t kStep = 4;

/// splitmix64: neighbouring seeds and offsets give unrelated numbers.
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

Generator::Generator(c10::DeviceIndex device)
    : c10::GeneratorImpl(device_at(device < 0 ? 0 : device),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

const at::Generator& Generator::default_of(c10::DeviceIndex device) {
  static auto* const generators = [] {
    auto* const made = new std::array<at::Generator, kNumDevices>;
    for (int index = 0; index < kNumDevices; ++index)
      made->at(static_cast<std::size_t>(index)) =
          at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index));
    return made;
  }();
  const auto* const guard = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
  return generators->at(static_cast<std::size_t>(device < 0 ? guard->getDevice().index() : device));
}

at::Generator Generator::next_on_cpu() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t seed = mixed(seed_ ^ mixed(offset_));
  offset_ += kStep;
  return at::detail::createCPUGenerator(seed);
}

void Generator::set_current_seed(std::uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

std::uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.is_cpu() && state.dtype() == caffe2::TypeMeta::Make<std::uint8_t>() &&
                  state.numel() == 2 * sizeof(std::uint64_t),
              "fakegpu: RNG state must be a torch.ByteTensor of 16 elements on the CPU");
  const auto* const bytes = static_cast<const char*>(state.data());
  std::memcpy(&seed_, bytes, sizeof(seed_));
  std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::empty({2 * sizeof(std::uint64_t)}, at::device(at::kCPU).dtype(at::kByte));
  auto* const bytes = state.data_ptr<std::uint8_t>();
  std::memcpy(bytes, &seed_, sizeof(seed_));
  std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* const copy = new Generator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

}  // namespace fakegpu
