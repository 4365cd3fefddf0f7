#include "libddp/snapshot/load_attempts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "libddp/base/error.h"

namespace libddp {

bool LoadAttempts::pass_over(std::string reason, bool is_damaged) {
  if (!is_damaged && reasons_.empty()) return false;
  reasons_.push_back(std::move(reason));
  return true;
}

std::string LoadAttempts::went_on(const std::string& name) const {
  return fmt::format("the training goes on from {}: {} newer could not be loaded", name,
                     reasons_.size() == 1 ? "one save that is"
                                          : fmt::format("{} saves that are", reasons_.size()));
}

void LoadAttempts::check() const {
  if (reasons_.empty()) return;
  throw SnapshotError(fmt::format(
      "libddp snapshot: none of the saves that are there can be loaded, and what they were loaded "
      "into may have parts of them. Hint: `libddp snapshot verify FOLDER` says which files are "
      "damaged; with another folder or run the training starts from nothing. The newest first:\n  "
      "{}",
      fmt::join(reasons_, "\n  ")));
}

}  // namespace libddp
