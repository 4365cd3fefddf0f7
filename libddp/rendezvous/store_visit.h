#pragma once

// Which store an address stands for, to a rank that comes back.
//
// A rank that leaves its group and joins the next one at the same address may be faster than rank
// 0. What answers there is the store of the group before, which ends while this rank waits for the
// others in it. So rank 0 names the store of each group, and a rank that was in the group of that
// store waits for the next one. A store that rank 0 did not open by a rendezvous has no name, and
// is taken as it is.
// Thread rule: any thread.
//
//   name_store(server, deadline);                           // rank 0
//   StoreVisit visit{.place = "10.0.0.7:29500, rank 3"};    // the others
//   auto store = open_unvisited(visit, open, deadline);
//   remember(visit);                                        // the group is there

#include <functional>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/deadline.h"
#include "libddp/rendezvous/rendezvous.h"

namespace libddp {

/// Another name than any before. Throws StoreError.
void name_store(const c10::intrusive_ptr<c10d::Store>& store, Deadline deadline);

/// A store that `open` returns, and its name in `visit`; not the one that was remembered at this
/// place. Throws what `open` throws, but where a store was remembered: this one may end at any
/// time, and `open` is called again. TimeoutError: the store of before is still there.
c10::intrusive_ptr<c10d::Store> open_unvisited(
    StoreVisit& visit, const std::function<c10::intrusive_ptr<c10d::Store>()>& open,
    Deadline deadline);

}  // namespace libddp
