#pragma once

// Errors that single ranks have met, while it is open whether they go on.
//
// NOTE [Reported errors]
// A rank that raises in a training step may never come to the collectives that the others wait in;
// or all ranks raise the same, or the script catches the error and goes on with another batch. So
// the error alone ends nothing. It ends the group when somebody has waited for that rank in a
// collective after the error and kGrace has passed without a word that it goes on. Ranks that have
// met as many errors at the same point of the program go on or not together: they do not take each
// other's errors for a reason.
// Thread rule: any thread.
//
//   reports.add(2, {41, 1, "in forward: ValueError: ...", now_ns});
//   if (const auto report = reports.due(running, now_ns)) fail(...);

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace libddp {

class ReportedErrors {
 public:
  struct Report {
    /// Last collective that the rank had issued, and the number of this one among those after it.
    std::uint64_t sequence = 0;
    std::uint64_t number = 0;
    std::string what;
    std::int64_t seen_ns = 0;
    /// The rank that is in it.
    int rank = -1;
  };
  static constexpr std::int64_t kGraceNs = 250'000'000;

  void add(int rank, Report report);
  void remove(int rank);
  bool empty() const;

  /// This rank itself has met an error after collective `sequence`: returns the number of it.
  std::uint64_t add_own(std::uint64_t sequence);

  /// One that ends the group, given the collective that runs here (0 = none).
  std::optional<Report> due(std::uint64_t running, std::int64_t now_ns) const;
  /// What `rank` is in; nullopt if nothing.
  std::optional<Report> of(int rank) const;

 private:
  bool is_shared(const Report& report) const {
    return report.sequence == own_sequence_ && report.number <= own_number_;
  }

  mutable std::mutex mutex_;
  std::map<int, Report> reports_;
  std::uint64_t own_sequence_ = 0;
  std::uint64_t own_number_ = 0;
};

}  // namespace libddp
