#pragma once

// Sees each operator that a thread runs below autograd, in C++. torch calls the top of a stack of
// modes with the operator and its boxed arguments, through the "interpreter" that the mode names;
// this is an interpreter that is none.
// Thread rule: the stack is the thread's own; enter and leave in the same thread, innermost first.
//
//   class Counting : public OpInterceptor {
//     void on_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) override {
//       ++count;
//       op.callBoxed(stack);
//     }
//   };
//   counting.enter();  x.mm(y);  counting.leave();
//
// While one is entered, Python code that lists the modes of the stack (higher-order operators such
// as flex attention do) gets torch's internal error.

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <memory>
#include <optional>

namespace libddp {

class OpInterceptor {
 public:
  OpInterceptor();
  virtual ~OpInterceptor();
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  void enter();
  void leave();

 protected:
  /// Replaces the operator; within it the interceptor is left, so `op.callBoxed(stack)` runs it.
  virtual void on_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) = 0;

 private:
  class Table;
  std::unique_ptr<Table> table_;
  c10::impl::PyInterpreter interpreter_;
  /// What torch restores before it asks a mode. Empty while not entered.
  std::optional<at::impl::MaybeSetTLSOnEntryGuard> keys_on_entry_;
};

}  // namespace libddp
