#pragma once

// A function that averages the gradients of a unit in the place of its group's collective.
// Thread rule: called in the backward pass, by the thread that runs it.
//
//   unit->reduce_by([&](const at::Tensor& gradients, const at::Tensor& average) { ... });

#include <ATen/core/Tensor.h>

#include <functional>

namespace libddp {

/// `gradients`: whole ones of this rank, the ranks' blocks one behind the other with zeros where
/// nothing came. `average`: the own block, to be filled with what `.grad` is to be; where nothing
/// is sharded both are one tensor.
using ReduceHook = std::function<void(const at::Tensor& gradients, const at::Tensor& average)>;

}  // namespace libddp
