#pragma once

// An exception in a backward pass: ends the pass and tells the other ranks, which may wait for what
// it has not sent. Each error is told once; a better text of it may follow.
//
// Thread rule: as Reducer.
//
//   PassErrors errors(group, pass, reduction, nullptr);
//   errors.guarded([&] { autograd_hook(index); });   // in what autograd calls
//   errors.break_off(error);                         // autograd has ended the pass
//   errors.backward_failed("RuntimeError: ...");     // the caller of backward() has seen it

#include <exception>
#include <functional>
#include <string>

#include "libddp/ddp/backward_pass.h"
#include "libddp/ddp/bucket_reduction.h"
#include "libddp/group/process_group.h"

namespace libddp {

class PassErrors {
 public:
  /// `rethrow`: see ReducerOptions.
  PassErrors(Group group, BackwardPass& pass, const BucketReduction& reduction,
             std::function<void(std::exception_ptr)> rethrow);

  /// What `function` throws ends the pass, and goes on as what `rethrow` makes of it.
  template <typename Function>
  void guarded(Function&& function) {
    try {
      function();
    } catch (...) {
      tell_and_rethrow();
    }
  }
  /// Autograd has ended the pass with `error`; null where that is not known.
  void break_off(const std::exception_ptr& error) noexcept;
  /// See Reducer::backward_failed.
  bool backward_failed(const std::string& what) noexcept;
  /// All ranks refuse the pass at its end, so that nobody is to be told.
  void all_refuse() { is_refused_ = true; }

 private:
  using Told = BackwardPass::Told;

  /// REQUIRES: in a handler. Throws its exception.
  [[noreturn]] void tell_and_rethrow();
  void break_pass(const std::string& what, Told told) noexcept;

  const Group group_;
  BackwardPass& pass_;
  const BucketReduction& reduction_;
  const std::function<void(std::exception_ptr)> rethrow_;
  /// The last pass was refused at its end, by all ranks.
  bool is_refused_ = false;
};

}  // namespace libddp
