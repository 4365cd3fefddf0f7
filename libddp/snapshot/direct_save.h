#pragma once

// A save that goes from the tensors of all ranks to where it is stored at once: no memory is kept,
// no keeper is needed, and one chunk of each rank is on its way at a time.
// Thread rule: a collective of the ranks.
//
//   save_directly(ranks, *store, {.step = 700, .sequence = 12}, /*keep=*/1, own, "{}");

#include <cstdint>
#include <string_view>

#include "libddp/slots/snapshot_store.h"
#include "libddp/snapshot/job_ranks.h"
#include "libddp/snapshot/own_pieces.h"

namespace libddp {

/// Returns the bytes of this rank. Throws ArgumentError where ranks save different steps, and
/// SnapshotError on all if one cannot store; what was there before stays then.
std::uint64_t save_directly(const JobRanks& ranks, SnapshotStore& store, const SavedStep& saved,
                            int keep, const OwnPieces& own, std::string_view values);

}  // namespace libddp
