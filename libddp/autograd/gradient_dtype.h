#pragma once

// The dtype of gradients on their way through a graph.
// Thread rule: before a backward pass of that graph.
//
//   keep_gradient_dtype(view_of_parameter);

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>

namespace libddp {

/// Gradients of an operation's output reach that operation as they were computed; autograd converts
/// them to the output's dtype otherwise. Nothing where it has no graph.
inline void keep_gradient_dtype(const at::Tensor& output) {
  const auto& node = output.grad_fn();
  if (node) node->mutable_input_metadata(output.output_nr()).set_grad_dtype(std::nullopt);
}

}  // namespace libddp
