#include "libddp/base/first_line.h"

#include <algorithm>
#include <cstddef>

namespace libddp {

std::string first_line_of(const std::exception_ptr& error) {
  constexpr std::size_t kMaxText = 500;
  std::string text = "an exception that is no std::exception";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    text = exception.what();
  } catch (...) {
  }
  return text.substr(0, std::min(text.find('\n'), kMaxText));
}

}  // namespace libddp
