#pragma once

// Parts of activation.cpp.

#include "bindings/bindings.h"

namespace libddp {

/// One node for the whole block (activation_node.cpp).
void bind_activation_node(pybind11::module_& module);
/// Results of chosen operators are kept (activation_selective.cpp).
void bind_activation_selective(pybind11::module_& module);

}  // namespace libddp
