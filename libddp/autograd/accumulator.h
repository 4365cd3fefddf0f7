#pragma once

// The AccumulateGrad node of a leaf, also of one that requires no gradient yet.
// Thread rule: while no backward pass runs.
//
//   const AccumulatorPtr node = accumulator_of(parameter);   // autograd itself holds it weakly

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace libddp {

/// shared_ptr or intrusive_ptr, as torch's version has it.
using AccumulatorPtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// REQUIRES: a leaf of a dtype that can have gradients.
inline AccumulatorPtr accumulator_of(const at::Tensor& leaf) {
  if (leaf.requires_grad()) return torch::autograd::impl::grad_accumulator(leaf);
  // Autograd makes none for what requires none, but uses one that is there.
  leaf.set_requires_grad(true);
  AccumulatorPtr node = torch::autograd::impl::grad_accumulator(leaf);
  leaf.set_requires_grad(false);
  return node;
}

template <typename Node>
bool refers_to(const std::weak_ptr<Node>& weak, const std::shared_ptr<Node>& node) {
  return !weak.owner_before(node) && !node.owner_before(weak);
}
template <typename Node>
bool refers_to(const c10::weak_intrusive_ptr<Node>& weak, const c10::intrusive_ptr<Node>& node) {
  return weak._unsafe_get_target() == node.get();
}

/// Whether `node`, which was once that of `leaf`, still is. Autograd drops it when the leaf's dtype
/// or device changes. A comparison of pointers, for once per forward.
inline bool is_accumulator_of(const AccumulatorPtr& node, const at::Tensor& leaf) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(leaf);
  return meta != nullptr && refers_to(meta->grad_accumulator_, node);
}

}  // namespace libddp
