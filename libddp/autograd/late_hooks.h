#pragma once

// Hooks that users have put on parameters (register_post_accumulate_grad_hook) or on their
// AccumulateGrad nodes, run late: when the gradient is what they are meant for, and not what
// autograd has accumulated on this rank.
//
// Autograd would run such a hook as soon as it has written `.grad`. It is taken away directly
// before that, in C++, and put back afterwards: a parameter's as soon as the gradient has come, a
// node's, which autograd is going through then, when the hooks are run or at the end of the pass.
// Thread rule: create and destroy while no backward pass runs; the rest in the thread that runs the
// pass.
//
//   LateHooks late(parameters);
//   late.put_back(index);                       // autograd has accumulated it: AccumulateHooks
//   if (late.has(index)) late.run(index);       // `.grad` is the average

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace libddp {

class LateHooks {
 public:
  /// REQUIRES: every parameter is a leaf of a dtype that can have gradients.
  explicit LateHooks(const std::vector<at::Tensor>& parameters);
  ~LateHooks();

  /// After autograd has accumulated the gradient of a parameter: the hooks of the parameter.
  void put_back(std::size_t index);
  /// All hooks, when the pass has ended or failed.
  void put_all_back();

  bool has(std::size_t index) const;
  /// Runs the hooks of a parameter, if it has any. What they throw comes out.
  void run(std::size_t index);

 private:
  struct State;
  class Taker;
  const std::shared_ptr<State> state_;
};

}  // namespace libddp
