#pragma once

// The Python objects that stand between autograd's saved tensor hooks and a Frame. Autograd calls
// the hooks once per saved tensor, so they are plain C functions of the interpreter: no bytecode,
// no conversion, about 50 ns each.
// Thread rule: under the interpreter lock.
//
//   HookScope hooks(frame);          // within its life the graph's tensors go to the frame
//   HookScope hooks(frame, pass);    // ... of a replay: to the pass; raises StopReplay at its end

#include <Python.h>

#include <memory>

#include "libddp/activation/frame.h"

namespace libddp {

class HookScope {
 public:
  /// For a forward pass, or with `pass` for a replay.
  explicit HookScope(const std::shared_ptr<Frame>& frame,
                     const std::shared_ptr<ReplayPass>& pass = nullptr);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
};

/// The Python exception that ends a replay; a BaseException, so that `except Exception` in a block
/// lets it through. Borrowed.
PyObject* stop_replay_type();

/// Sets the Python error for the C++ exception that is being handled. For C functions of the
/// interpreter, which pybind11 does not wrap.
void set_python_error();

}  // namespace libddp
