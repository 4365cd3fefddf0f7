#include "libddp/base/random.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <array>
#include <cerrno>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"

namespace libddp {

std::string random_hex(std::size_t num_bytes) {
  std::array<unsigned char, 256> bytes;
  LIBDDP_CHECK(num_bytes <= bytes.size(), "too many random bytes asked for");
  // Up to 256 bytes come whole once the kernel's pool is ready; before that a signal may interrupt.
  ssize_t got = 0;
  do {
    got = ::getrandom(bytes.data(), num_bytes, 0);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(num_bytes)) {
    throw Error(fmt::format("libddp: no random bytes: {}.", errno_text("getrandom", errno)));
  }
  std::string text;
  for (std::size_t i = 0; i < num_bytes; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

bool is_random_hex(std::string_view text, std::size_t num_bytes) {
  return text.size() == 2 * num_bytes &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace libddp
