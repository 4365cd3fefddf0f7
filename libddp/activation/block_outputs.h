#pragma once

// The outputs of a block that ran without a graph, as outputs of the node that stands for it. A
// change in place of one that shares its memory with an input or with another output cannot become
// a wrong gradient: they stay views, as autograd knows them, and it refuses the change or the later
// use of the others. An output whose memory nobody else has may be changed.
// Thread rule: one thread at a time.
//
//   BlockOutputs outputs;
//   outputs.adopt(node, inputs, tensors, {});   // `tensors` are the node's outputs now
//   outputs.require_unchanged(name);            // in backward, before the block runs again

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libddp/autograd/node_pointer.h"

namespace libddp {

class BlockOutputs {
 public:
  /// `must_stay`: whether a view must stay the very tensor that it is; may be empty.
  void adopt(const NodePointer& node, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor>& tensors,
             const std::function<bool(const at::Tensor&)>& must_stay);

  std::size_t size() const { return is_differentiable_.size(); }
  /// Whether it is an output of the node.
  bool is_differentiable(std::size_t i) const { return is_differentiable_[i] != 0; }

  /// Throws CheckpointError if an output was a view of something that the block still has, and has
  /// been changed in place.
  void require_unchanged(const std::function<std::string()>& name) const;

 private:
  /// What an output was a view of.
  struct Source {
    std::size_t output;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> base;
    c10::VariableVersion counter;
    std::int64_t version;
  };

  at::Tensor own(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& tensors,
                 std::size_t i, const std::function<bool(const at::Tensor&)>& must_stay);

  std::vector<char> is_differentiable_;
  std::vector<Source> sources_;
};

/// Throws ArgumentError if a tensor belongs to a transform of torch.func (vmap, grad, jvp, ...) or
/// to forward-mode AD: a block's second run is outside of them, so its part would be lost.
void refuse_transforms(const std::vector<at::Tensor>& tensors,
                       const std::function<std::string()>& name);

}  // namespace libddp
