#pragma once

// Pointers to nodes of autograd's graph: shared_ptr up to torch 2.14, intrusive_ptr from 2.15 on.
// Thread rule: none of its own.
//
//   NodePointer node = make_node<MyNode>(argument);
//   set_grad_accumulator(tensor, weak(node));

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace libddp {

using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Made, typename Pointer = NodePointer, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    // torch's own way to delete: without recursion over a long chain of nodes.
    return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...),
                                 [](Made* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
  }
}

template <typename Pointer>
auto weak(const Pointer& node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::weak_ptr<torch::autograd::Node>(node);
  } else {
    return c10::weak_intrusive_ptr<torch::autograd::Node>(node);
  }
}

}  // namespace libddp
