#pragma once

// Sees chosen operators as a thread runs them below autograd, in C++. Each chosen operator gets,
// once and for good, a kernel at a dispatch key that nothing else uses; only while an interceptor
// is entered does the thread dispatch over that key. So other operators, and other threads, run as
// ever. Thread rule: `choose` in any thread; enter and leave in the same thread, innermost first.
//
//   class Counting : public OpInterceptor {
//     void on_op(const Op& op, torch::jit::Stack* stack) override {
//       ++count;
//       run(op, stack);
//     }
//   };
//   OpInterceptor::choose(mm);
//   counting.enter();  x.mm(y);  counting.leave();
//
// Not seen: operators on meta tensors and those that a tracer of torch (fake tensors, functional
// ones, proxies) sees. While one is entered, higher-order operators of Python (flex attention) are
// refused by torch, which knows no kernel of theirs for the key.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

namespace libddp {

class OpInterceptor {
 public:
  OpInterceptor() = default;
  virtual ~OpInterceptor() = default;
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  /// Whether this torch leaves the dispatch key to others.
  static bool is_available();

  /// From now on interceptors see the operator. REQUIRES: is_available().
  static void choose(const c10::OperatorHandle& op);

  void enter();
  void leave();

 protected:
  struct Op {
    const c10::OperatorHandle& handle;
    /// What is left to dispatch to.
    c10::DispatchKeySet keys;
  };

  /// Replaces the operator; those that it runs are not seen.
  virtual void on_op(const Op& op, torch::jit::Stack* stack) = 0;

  /// Runs the operator as if this interceptor were not there.
  void run(const Op& op, torch::jit::Stack* stack);

 private:
  static void ask(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

  OpInterceptor* outer_ = nullptr;
};

/// Within its life the interceptor is entered; nullptr: nothing happens.
class InterceptorScope {
 public:
  explicit InterceptorScope(OpInterceptor* interceptor) : interceptor_(interceptor) {
    if (interceptor_ != nullptr) interceptor_->enter();
  }
  ~InterceptorScope() {
    if (interceptor_ != nullptr) interceptor_->leave();
  }
  InterceptorScope(const InterceptorScope&) = delete;
  InterceptorScope& operator=(const InterceptorScope&) = delete;

 private:
  OpInterceptor* interceptor_;
};

}  // namespace libddp
