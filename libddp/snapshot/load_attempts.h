#pragma once

// What becomes of a load whose newest save does not do, for Snapshot::load and the faces of it in
// Python alike: which error ends it, and what the last one says.
//
// A damaged save is passed over and the next older one tried. A save of another model is the
// caller's to change, and nothing has been changed by it; behind a damaged one it is a reason more,
// since what was loaded into may have parts of that one.
// Thread rule: one thread. The ranks take the same decisions, as all of them have an error of the
// same kind (JobRanks::together).
//
//   LoadAttempts attempts;
//   try {
//     read(version);
//     log(attempts.went_on(version.name()));
//   } catch (const ArgumentError& error) {
//     if (!attempts.pass_over(error.what(), /*is_damaged=*/false)) throw;
//   } catch (const SnapshotError& error) {
//     attempts.pass_over(error.what(), /*is_damaged=*/true);
//   }
//   ...
//   attempts.check();

#include <string>
#include <vector>

namespace libddp {

class LoadAttempts {
 public:
  /// A save could not be loaded. False: nothing older is tried, and its error is the load's.
  bool pass_over(std::string reason, bool is_damaged);
  /// Saves were passed over.
  bool has_passed_over() const { return !reasons_.empty(); }
  /// For the log, when a save was loaded behind those: a clause.
  std::string went_on(const std::string& name) const;
  /// There is nothing older. Throws SnapshotError with all reasons if saves were passed over.
  void check() const;

 private:
  std::vector<std::string> reasons_;
};

}  // namespace libddp
