#pragma once

// The AccumulateGrad node of a leaf, also of one that requires no gradient yet.
// Thread rule: while no backward pass runs.
//
//   const AccumulatorPtr node = accumulator_of(parameter);   // autograd itself holds it weakly

#include <torch/csrc/autograd/variable.h>

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

}  // namespace libddp
