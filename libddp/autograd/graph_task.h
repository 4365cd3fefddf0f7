#pragma once

// The backward pass that this thread runs, which torch calls a GraphTask and does not hand out.
// Thread rule: call in the thread that runs the pass, inside one of its nodes or hooks.
//
//   const PassFailure failure = PassFailure::of_current();   // in a hook
//   if (const std::exception_ptr error = failure.error()) report(first_line_of(error));   // later

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>
#include <vector>

namespace libddp {

/// Null outside of a pass.
torch::autograd::GraphTask* current_graph_task();

/// At the end of a pass with create_graph=True: what it has computed for its caller that has a
/// graph of its own, where a further pass through this one's nodes begins. Those are the gradients
/// of given inputs, and what leaves have in `.grad`. Gradients that hooks have kept are not among
/// them.
std::vector<at::Tensor> gradients_with_graph();

/// What a pass has failed of, for who outlives it: autograd drops the callbacks of a pass that
/// fails, and whoever notices that in a destructor asks here for the reason.
class PassFailure {
 public:
  /// Of the pass that this thread runs; of none outside of one.
  static PassFailure of_current();
  PassFailure() = default;

  /// Null while the pass runs, and where it went well.
  std::exception_ptr error() const;

 private:
  using Result = c10::intrusive_ptr<c10::ivalue::Future>;
  explicit PassFailure(Result result) : result_(std::move(result)) {}

  Result result_;
};

}  // namespace libddp
