#pragma once

// What tests of the fake device begin with.
//
//   TEST_CASE_METHOD(WithDevice, "...") { at::Tensor x = at::ones({4}, on_device()); }

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <vector>

#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/race_checker.h"

namespace fakegpu::test {

inline at::TensorOptions on_device(int index = 0) {
  return at::TensorOptions().device(device_at(index));
}

inline c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}

inline c10::Stream new_stream(int device = 0) { return guard().getNewStream(device_at(device)); }
inline c10::Stream default_stream(int device = 0) {
  return guard().getDefaultStream(device_at(device));
}

/// The checker starts afresh.
struct WithDevice {
  WithDevice() { reset(); }

  /// What was found since the last call.
  static std::vector<std::string> race_texts() {
    std::vector<std::string> texts;
    for (const Race& race : races()) texts.push_back(race.text());
    return texts;
  }
};

}  // namespace fakegpu::test
