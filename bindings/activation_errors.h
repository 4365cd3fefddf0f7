#pragma once

// Errors on their way between a checkpointed Python block, autograd's threads and the interpreter.
// Thread rule: any thread; the interpreter lock is taken.
//
//   try { ... } catch (...) { throw_python_error(); }   // what is caught, as torch's python_error

#include <Python.h>

namespace libddp {

/// The Python exception that ends a replay; a BaseException, so that `except Exception` in a block
/// lets it through. Borrowed. REQUIRES: the interpreter lock.
PyObject* stop_replay_type();

/// Throws what is being handled as the exception that torch's engine carries from thread to thread.
[[noreturn]] void throw_python_error();

/// Throws StopReplay.
[[noreturn]] void throw_stop_replay();

}  // namespace libddp
