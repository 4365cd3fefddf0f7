#include "libddp/slots/run_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"

namespace libddp {

bool is_run_name(const std::string& run) {
  const auto is_letter = [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_'; };
  return !run.empty() && run.size() <= 40 && std::all_of(run.begin(), run.end(), is_letter);
}

std::string run_in_text(std::string text, const std::string& path) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  if (is_run_name(text)) return text;
  throw SnapshotError(
      fmt::format("libddp snapshot: {}: it is no name of a run. Hint: look at the folder, its disk "
                  "and its permissions.",
                  printable(path)));
}

}  // namespace libddp
