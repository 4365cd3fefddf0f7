#pragma once

// Calls a function each time autograd has accumulated a parameter's gradient into `.grad`.
//
// The hooks stand on the parameters' AccumulateGrad nodes, in C++, and coexist with hooks of the
// user. Autograd holds those nodes weakly; this class keeps them alive, so that a hook is not lost
// between two graphs.
// Thread rule: create and destroy while no backward pass runs. The function runs in the thread that
// runs the node; what it throws ends the pass.
//
//   AccumulateHooks hooks(parameters, [&](std::size_t index, const at::Tensor&) { ready(index); });

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace torch::autograd {
struct FunctionPostHook;
}

namespace libddp {

class AccumulateHooks {
 public:
  /// `incoming`: what has been accumulated, whose memory `.grad` may have taken over; undefined
  /// where there was none.
  using OnGradient = std::function<void(std::size_t index, const at::Tensor& incoming)>;

  /// REQUIRES: every parameter is a leaf of a dtype that can have gradients. One that requires none
  /// now may do so later.
  AccumulateHooks(const std::vector<at::Tensor>& parameters, OnGradient on_gradient);
  ~AccumulateHooks();

  /// Whether a hook of a node is one of this class.
  static bool has_made(const torch::autograd::FunctionPostHook& hook);

  /// Follows the parameters whose node autograd has replaced, as it does when a parameter's dtype
  /// changes, also there and back. Costs next to nothing where none has. While no backward pass
  /// runs.
  void renew();
  /// Gives the parameters their nodes back that autograd has dropped, where graphs still refer to
  /// them. REQUIRES: the parameters have the dtypes that they had at construction.
  void reinstate();
  /// The dtype that autograd converts gradients to before they are accumulated, from now on;
  /// nullopt: none, they come as they were computed.
  void accept(std::optional<at::ScalarType> dtype);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace libddp
