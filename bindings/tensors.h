#pragma once

// What the bindings of models share: named tensors, the tensors in an output, errors in backward.
// Thread rule: free functions, called with the interpreter lock.
//
//   std::vector<at::Tensor> found;
//   collect_tensors_of(output, found);

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "libddp/module/named_tensor.h"

namespace libddp {

using PythonTensors = std::vector<std::pair<std::string, at::Tensor>>;

NamedTensors named(const PythonTensors& tensors);

/// Tensors in tensors, tuples, lists, dicts and dataclasses.
void collect_tensors_of(pybind11::handle value, std::vector<at::Tensor>& found);

/// The same memory as a tensor of its own, that begins there: a DTensor has the storage offset of
/// its local tensor, and files get all of a tensor's storage.
at::Tensor alias_of(const at::Tensor& tensor);

/// Autograd knows only Python errors that are already set; any other exception would come out of
/// backward() as a plain RuntimeError. Takes the lock itself.
[[noreturn]] void rethrow_as_python_error(std::exception_ptr error);

/// What other ranks are told of an exception, with the class that scripts see:
/// libddp.distributed._exit.describe. Empty where that fails. Takes the lock itself.
std::string describe_python_error(const std::exception_ptr& error);

}  // namespace libddp
