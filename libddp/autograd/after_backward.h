#pragma once

// Start and end of a backward pass, as autograd's engine tells them.
//
// Passes can nest: reentrant activation checkpointing runs a pass inside a node of another one.
// Thread rule: call in the thread that runs the pass; callbacks run there too.
//
//   kept = call_before_backward(outputs, [&] { begin(); });      // after a forward
//   call_after_backward([&] { if (!is_nested_backward()) finish(); });   // inside a pass

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace libddp {

/// Calls `callback` in each backward pass that reaches one of `outputs`, before the pass enters the
/// graph behind it; once per output reached. Tensors without a graph are skipped, and so are passes
/// that compute the gradients of given inputs only (torch.autograd.grad, as in gradient penalties).
/// An output may also be a leaf that requires a gradient (an input handed through, a parameter as
/// it is): keep what is returned until the pass; without it a leaf does not call. A leaf calls in
/// the first pass that reaches it, and in later ones that reach another of `outputs` too: without
/// one they may be about the leaf alone.
[[nodiscard]] std::shared_ptr<void> call_before_backward(const std::vector<at::Tensor>& outputs,
                                                         const std::function<void()>& callback);

/// The same, for all passes, those that compute the gradients of given inputs only among them:
/// the callback is told whether the pass accumulates into the leaves.
[[nodiscard]] std::shared_ptr<void> call_before_any_backward(
    const std::vector<at::Tensor>& outputs, const std::function<void(bool accumulates)>& callback);

/// Calls `callback` when the innermost pass that runs in this thread has done its last node. Not
/// called where the pass fails. What it throws comes out of backward().
void call_after_backward(std::function<void()> callback);

/// Inside a callback of call_after_backward: did the pass that just ended run inside another one?
bool is_nested_backward();

}  // namespace libddp
