#pragma once

// How much memory this process may still take: the least of what the machine has left and what each
// control group above it allows, where page cache that can be dropped counts as left.
// Thread rule: free functions; any thread.
//
//   const MemoryLimit limit = memory_limit();
//   if (needed > limit.available_bytes) throw Error(fmt::format("... {}", limit.source));

#include <cstdint>
#include <string>

namespace libddp {

struct MemoryLimit {
  std::uint64_t available_bytes = 0;
  /// What sets it: "the machine", "the control group /job/7".
  std::string source;
};

/// Files that cannot be read set no limit.
MemoryLimit memory_limit();
/// For tests: /proc and /sys/fs/cgroup stand in `root`.
MemoryLimit memory_limit_in(const std::string& root);

}  // namespace libddp
