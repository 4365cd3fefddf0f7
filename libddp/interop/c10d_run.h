#pragma once

// How every method of C10dBackend issues an operation; for its sources only.
// Thread rule: as C10dBackend.
//
//   return run(c10d::OpType::BROADCAST, {tensors},
//              [&](const Group& group) { return group->broadcast(tensors[0], root, options); });

#include <utility>

#include "libddp/interop/c10d_backend.h"
#include "libddp/interop/c10d_membership.h"
#include "libddp/interop/c10d_work.h"
#include "libddp/interop/torch_errors.h"
#include "libddp/interop/written_outputs.h"

namespace libddp {

template <class Issue>
C10dBackend::WorkHandle C10dBackend::run(c10d::OpType type, TensorLists results, Issue&& issue) {
  return for_torch([&]() -> WorkHandle {
    Group group = membership_->find();
    if (!group) group = membership_->group(c10d::opTypeToString(type));
    auto handle = c10::make_intrusive<C10dWork>(type, *group);
    WorkPtr work = issue(group);
    for (const Tensors& list : results) note_written(type, list);
    {
      std::lock_guard lock(batch_mutex_);
      if (batch_ && work) batch_->works.push_back(work);
    }
    handle->attach(std::move(work), std::move(results));
    return handle;
  });
}

}  // namespace libddp
