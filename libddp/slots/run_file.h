#pragma once

// The file `run` beside snapshots: the name of the job that stores there.
// Thread rule: free functions; any thread.
//
//   run_in_text("5f0c\n", "out/run/run");     // "5f0c"

#include <cstdint>
#include <string>

namespace libddp {

inline constexpr const char* kRunFile = "run";
inline constexpr std::uint64_t kMaxRunFileBytes = 4096;

/// Letters, digits, '-' and '_', 1 to 40 of them.
bool is_run_name(const std::string& run);
/// What the file at `path` says. Throws SnapshotError for what is no name.
std::string run_in_text(std::string text, const std::string& path);

}  // namespace libddp
