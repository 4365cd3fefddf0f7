#pragma once

// Which job a snapshot belongs to: under that name its next start finds the memory of this one.
// Thread rule: free functions; any thread.
//
//   run_of_folder("out/run", true);     // "5f0c...", the same as long as the folder lives

#include <string>

namespace libddp {

/// Throws ArgumentError unless it is empty or has at most 40 letters, digits, '-' and '_'.
void check_run_name(const std::string& run);
/// Drawn when the folder is made, and kept in it: a folder that was removed and made again is
/// another job's. Empty where there is none and `may_create` is not given. Throws SnapshotError
/// with the path and the system's reason.
std::string run_of_folder(const std::string& folder, bool may_create);
/// What the launcher says; without one, of the process that started this one.
std::string run_of_launcher();

}  // namespace libddp
