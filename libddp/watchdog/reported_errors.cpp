#include "libddp/watchdog/reported_errors.h"

#include <utility>

namespace libddp {

void ReportedErrors::add(int rank, Report report) {
  const std::lock_guard lock(mutex_);
  report.rank = rank;
  reports_.insert_or_assign(rank, std::move(report));
}

void ReportedErrors::remove(int rank) {
  const std::lock_guard lock(mutex_);
  reports_.erase(rank);
}

bool ReportedErrors::empty() const {
  const std::lock_guard lock(mutex_);
  return reports_.empty();
}

std::uint64_t ReportedErrors::add_own(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  if (own_sequence_ != sequence) own_number_ = 0;
  own_sequence_ = sequence;
  return ++own_number_;
}

std::optional<ReportedErrors::Report> ReportedErrors::due(std::uint64_t running,
                                                          std::int64_t now_ns) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, report] : reports_) {
    const bool is_waited_for = running > report.sequence;
    if (is_waited_for && !is_shared(report) && now_ns - report.seen_ns >= kGraceNs) {
      return report;
    }
  }
  return std::nullopt;
}

std::optional<ReportedErrors::Report> ReportedErrors::of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = reports_.find(rank);
  if (found == reports_.end()) return std::nullopt;
  return found->second;
}

}  // namespace libddp
