#pragma once

// Unpredictable names and tokens from the kernel. Thread rule: any thread.
//
//   std::string token = random_hex(16);   // 32 hexadecimal digits

#include <cstddef>
#include <string>
#include <string_view>

namespace libddp {

/// `num_bytes` (at most 256) random bytes as lower-case hexadecimal digits.
std::string random_hex(std::size_t num_bytes);

/// Whether `text` has the form of random_hex(num_bytes).
bool is_random_hex(std::string_view text, std::size_t num_bytes);

}  // namespace libddp
