#pragma once

// The random number generators that a block may draw from: the host's, and those of the devices
// that its inputs lie on. A replay that starts from the same state draws the same dropout masks.
// Thread rule: each object in one thread; the generators' own locks are taken.
//
//   auto before = RandomState::now(devices);   // a copy of 2.5 KB, no tensor
//   run();
//   if (before.is_current()) before_is_not_needed();
//   { RandomScope scope(before); run(); }      // the same numbers; the present state comes back

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace libddp {

class RandomState {
 public:
  /// Of the host's default generator and of the default generators of `devices`.
  static RandomState now(const std::vector<c10::Device>& devices);

  /// No generator has been drawn from since.
  bool is_current() const;

  void restore() const;

  std::vector<c10::Device> devices() const;

 private:
  at::mt19937_data_pod host_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  std::vector<std::pair<c10::Device, at::Tensor>> devices_;
};

/// Within its life the generators go on from `from`; nullptr: nothing happens.
class RandomScope {
 public:
  explicit RandomScope(const RandomState* from);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  std::unique_ptr<RandomState> former_;
};

/// The devices among `device` types that have a generator, each once. Host tensors add none.
void add_random_device(std::vector<c10::Device>& devices, c10::Device device);

}  // namespace libddp
