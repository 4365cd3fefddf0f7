#pragma once

// Hooks that users have put on parameters (register_post_accumulate_grad_hook), run late: when the
// gradient is what they are meant for, and not what autograd has accumulated on this rank.
//
// Autograd would run such a hook as soon as it has written `.grad`. The hook is taken away directly
// before that, in C++, and put back directly afterwards, so that whoever adds, removes or lists
// hooks finds them where they belong, also when a pass fails.
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

  /// After autograd has accumulated the gradient of a parameter.
  void put_back(std::size_t index);
  /// The same for all, after a pass that failed.
  void put_all_back();

  bool has(std::size_t index) const;
  /// Runs the hooks of a parameter, if it has any. What they throw comes out.
  void run(std::size_t index) const;

 private:
  struct State;
  class Taker;
  const std::shared_ptr<State> state_;
};

}  // namespace libddp
