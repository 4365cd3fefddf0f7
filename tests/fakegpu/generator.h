#pragma once

// Random numbers of the fake device: a seed and an offset, as CUDA's generators have them, so that
// their state is 16 bytes. Each operator that draws gets a CPU generator of its own, seeded from
// both.
// Thread rule: GeneratorImpl::mutex_.

#include <ATen/core/Generator.h>

namespace fakegpu {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  /// What a device's operators draw from that name no generator.
  static const at::Generator& default_of(c10::DeviceIndex device);

  /// For one operator; the next one's numbers differ.
  at::Generator next_on_cpu();

  void set_current_seed(std::uint64_t seed) override;
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override;
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override;

  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t offset_ = 0;
};

}  // namespace fakegpu
