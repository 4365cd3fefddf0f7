#include "libddp/activation/random_state.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace libddp {
namespace {

at::CPUGeneratorImpl& host_generator() {
  return *static_cast<at::CPUGeneratorImpl*>(
      at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl());
}

at::Tensor device_state(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// Both are small byte tensors in host memory.
bool equal_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

RandomState RandomState::now(const std::vector<c10::Device>& devices) {
  RandomState state;
  at::CPUGeneratorImpl& host = host_generator();
  {
    const std::lock_guard lock(host.mutex_);
    state.host_ = host.engine().data();
    state.next_float_ = host.next_float_normal_sample();
    state.next_double_ = host.next_double_normal_sample();
  }
  for (c10::Device device : devices) state.devices_.emplace_back(device, device_state(device));
  return state;
}

bool RandomState::is_current() const {
  at::CPUGeneratorImpl& host = host_generator();
  const std::lock_guard lock(host.mutex_);
  // Each number drawn moves the place in the table; the table itself changes as a whole.
  const at::mt19937_data_pod host_now = host.engine().data();
  const bool is_same_host =
      host_now.next_ == host_.next_ && host_now.left_ == host_.left_ &&
      host_now.seed_ == host_.seed_ &&
      std::equal(host_.state_.begin(), host_.state_.begin() + 8, host_now.state_.begin()) &&
      host.next_float_normal_sample() == next_float_ &&
      host.next_double_normal_sample() == next_double_;
  return is_same_host && std::all_of(devices_.begin(), devices_.end(), [](const auto& device) {
           return equal_bytes(device.second, device_state(device.first));
         });
}

void RandomState::restore() const {
  at::CPUGeneratorImpl& host = host_generator();
  {
    const std::lock_guard lock(host.mutex_);
    at::mt19937 engine;
    engine.set_data(host_);
    host.set_engine(engine);
    host.set_next_float_normal_sample(next_float_);
    host.set_next_double_normal_sample(next_double_);
  }
  for (const auto& [device, state] : devices_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

std::vector<c10::Device> RandomState::devices() const {
  std::vector<c10::Device> devices;
  for (const auto& [device, state] : devices_) devices.push_back(device);
  return devices;
}

RandomScope::RandomScope(const RandomState* from) {
  if (from == nullptr) return;
  former_ = std::make_unique<RandomState>(RandomState::now(from->devices()));
  from->restore();
}

RandomScope::~RandomScope() {
  if (former_) former_->restore();
}

void add_random_device(std::vector<c10::Device>& devices, c10::Device device) {
  const bool has_generator = device.is_cuda() || device.is_hip() || device.is_xpu() ||
                             device.is_mps() || device.is_privateuseone();
  if (has_generator && std::find(devices.begin(), devices.end(), device) == devices.end()) {
    devices.push_back(device);
  }
}

}  // namespace libddp
