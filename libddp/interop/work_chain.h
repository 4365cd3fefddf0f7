#pragma once

// Works made of other works: what has to happen when one ends, and the end of several.
//
// Works on a device are chained in the order of streams: what follows is launched at once, in the
// current stream, which waits for the first work.
// Thread rule: free functions; any thread. On the host `then` runs in the thread that finishes the
// first work, so it must be short and must not wait for another operation of the group; so does
// `next`.
//
//   WorkPtr work = after(group->all_gather(parts, flat, {.async = true}), outputs,
//                        [=] { scatter_back(parts, outputs); });

#include <functional>
#include <vector>

#include "libddp/group/work.h"

namespace libddp {

/// Done once `first` has succeeded and `then` has run, or `first` failed. `tensors` = its result.
WorkPtr after(const WorkPtr& first, std::vector<at::Tensor> tensors, std::function<void()> then);

/// Done once `first` and the work that `next` then issues are; fails with the first that fails.
WorkPtr followed_by(const WorkPtr& first, std::function<WorkPtr()> next);

/// Done once all are; carries the first error. `works` must not be empty.
WorkPtr all_of(const std::vector<WorkPtr>& works, std::vector<at::Tensor> tensors);

/// A work that has succeeded already.
WorkPtr done(std::string description, std::vector<at::Tensor> tensors);

}  // namespace libddp
