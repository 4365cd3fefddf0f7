#pragma once

// Groups as Python holds them.
// Thread rule: free functions, called with the interpreter lock.
//
//   return hold(ProcessGroup::create(store, options));

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "libddp/group/process_group.h"
#include "libddp/interop/callback_thread.h"

namespace libddp {

/// A reference whose last release gives up the interpreter lock: a group's end joins its threads,
/// and one of them may be about to free a tensor that Python knows, for which it needs the lock.
inline Group hold(Group group) {
  if (!group) return nullptr;
  ProcessGroup* raw = group.get();
  return Group(raw, [group = std::move(group)](ProcessGroup* held) mutable {
    CallbackThread::release(held);
    if (Py_IsInitialized() && PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      group.reset();
    } else {
      group.reset();
    }
  });
}

}  // namespace libddp
