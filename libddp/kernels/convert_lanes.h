#pragma once

// float32 to bf16 and back, over the vectors of reduce_lanes.h and under its rules: included only
// by reduce_kernels_<isa>.cpp, everything in an anonymous namespace. Thread rule: pure functions.
//
//   return {.find = find_kernel<Isa>, .narrow = narrow_floats<Isa>, .widen = widen_floats<Isa>};

#include <cstdint>
#include <cstring>

#include "libddp/kernels/reduce_lanes.h"

namespace libddp {
namespace {

template <class Isa>
void narrow_floats(std::uint16_t* to, const float* from, std::size_t count) {
  using Floats = NativeLanes<float, Isa>;
  using Halves = BFloat16Lanes<Isa>;
  constexpr std::size_t kStep = Floats::kLanes;
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) Halves::store(to + i, Floats::load(from + i));
  if (i == count) return;
  float padded[kStep] = {};
  std::uint16_t narrowed[kStep];
  std::memcpy(padded, from + i, (count - i) * sizeof(float));
  Halves::store(narrowed, Floats::load(padded));
  std::memcpy(to + i, narrowed, (count - i) * sizeof(std::uint16_t));
}

template <class Isa>
void widen_floats(float* to, const std::uint16_t* from, std::size_t count) {
  using Floats = NativeLanes<float, Isa>;
  using Halves = BFloat16Lanes<Isa>;
  constexpr std::size_t kStep = Floats::kLanes;
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) Floats::store(to + i, Halves::load(from + i));
  if (i == count) return;
  std::uint16_t padded[kStep] = {};
  float widened[kStep];
  std::memcpy(padded, from + i, (count - i) * sizeof(std::uint16_t));
  Floats::store(widened, Halves::load(padded));
  std::memcpy(to + i, widened, (count - i) * sizeof(float));
}

}  // namespace
}  // namespace libddp
