#pragma once

// How a process gives the run key to its keeper: not the key itself, but one that is derived for
// connections between the keepers of a run, in a sealed memory file beside the message.
// Thread rule: free functions; any thread.
//
//   const UniqueFd passed = pass_keeper_key(*given_run_key(), "job 7");       // the process
//   std::shared_ptr<const RunKey> key = take_keeper_key(passed);              // its keeper

#include <memory>
#include <string>

#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/run_key.h"

namespace libddp {

/// Throws Error where the system has no memory file.
UniqueFd pass_keeper_key(const RunKey& key, const std::string& run);

/// Throws SnapshotError if it is no such file, ArgumentError if it holds no key.
std::shared_ptr<const RunKey> take_keeper_key(const UniqueFd& passed);

}  // namespace libddp
