#include "libddp/base/first_line.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace libddp {
namespace {

std::atomic<ErrorDescriber> describer_of_language{nullptr};

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void describe_errors_by(ErrorDescriber describer) { describer_of_language = describer; }

std::string first_line_of(const std::exception_ptr& error) {
  constexpr std::size_t kMaxText = 500;
  const ErrorDescriber describer = describer_of_language;
  std::string text = describer ? describer(error) : "";
  if (text.empty()) text = message_of(error);
  return text.substr(0, std::min(text.find('\n'), kMaxText));
}

}  // namespace libddp
