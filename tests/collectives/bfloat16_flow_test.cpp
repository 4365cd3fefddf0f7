#include "libddp/collectives/bfloat16_flow.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "libddp/kernels/reduce_table.h"
#include "tests/support/catch.h"

using namespace libddp;

namespace {

std::vector<float> floats_of_all_sizes() {
  std::minstd_rand random(5);
  std::uniform_int_distribution<std::uint32_t> bits;
  std::vector<float> floats{0.0f,
                            -0.0f,
                            1.0f + 0x1p-8f,  // a tie that rounds down
                            1.0f + 0x3p-8f,  // a tie that rounds up
                            std::numeric_limits<float>::max(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::quiet_NaN()};
  while (floats.size() < 1003) floats.push_back(std::bit_cast<float>(bits(random)));
  return floats;
}

// By the definition: the nearest value with 8 significant bits, the even one of two.
std::uint16_t rounded_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7FC0;
  const std::uint32_t lower = bits & 0xFFFF;
  const std::uint32_t upper = bits >> 16;
  const bool is_up = lower > 0x8000 || (lower == 0x8000 && upper % 2 == 1);
  return static_cast<std::uint16_t>(upper + is_up);
}

}  // namespace

TEST_CASE("Floats become bfloat16 and back, alike in every instruction set") {
  const std::vector<float> floats = floats_of_all_sizes();
  for (const KernelTable& table : {scalar_kernels(), best_kernels()}) {
    for (const std::size_t count : {1u, 15u, 16u, 1003u}) {
      std::vector<std::uint16_t> narrow(count + 1, 0xABCD);
      table.narrow(narrow.data(), floats.data(), count);
      std::vector<float> wide(count + 1, 42.0f);
      table.widen(wide.data(), narrow.data(), count);
      for (std::size_t i = 0; i < count; ++i) {
        INFO(floats[i]);
        REQUIRE(narrow[i] == rounded_to_bfloat16(floats[i]));
        REQUIRE(std::bit_cast<std::uint32_t>(wide[i]) == std::uint32_t{narrow[i]} << 16);
      }
      REQUIRE(narrow[count] == 0xABCD);
      REQUIRE(wide[count] == 42.0f);
    }
  }
}
