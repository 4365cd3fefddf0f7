#pragma once

// Goes on in the same process after another rank was lost: the launcher, `libddp run --in-place`,
// replaces it, and survivors and newcomers meet in a new group (docs/elastic.md).
//
// Each rank calls it with null first, in the place of init_process_group: a newcomer is told there
// who it is. A rank whose own code failed does not call it, and ends.
// Thread rule: one thread; sets RANK, WORLD_SIZE and their like in the environment, so no other
// thread may read that meanwhile.
//
//   libddp::Group group = libddp::rejoin(nullptr);
//   for (;;) {
//     try {
//       train(group);                                   // loads the newest snapshot first
//       break;
//     } catch (const libddp::Error& error) {
//       if (!libddp::is_of_others(error)) throw;
//       group = libddp::rejoin(group, std::chrono::minutes(2));
//     }
//   }

#include <chrono>

#include "libddp/base/error.h"
#include "libddp/group/init_process_group.h"
#include "libddp/group/process_group.h"

namespace libddp {

/// Leaves `group`, waits for the launcher, joins the next group. The launcher waits for survivors
/// as long as its --rejoin-timeout says. Throws StateError where the process was not started by
/// `libddp run --in-place`, and where that ends the run; TimeoutError where no next epoch begins
/// within `limit`; what init_process_group throws, with `options`.
Group rejoin(const Group& group, std::chrono::milliseconds limit = std::chrono::minutes(10),
             const InitOptions& options = {});

/// Whether an error tells that another rank, a network or the store is gone, or that the launcher
/// has asked this rank to leave; not of a mistake here, or between ranks that call different
/// things.
bool is_of_others(const Error& error);

}  // namespace libddp
