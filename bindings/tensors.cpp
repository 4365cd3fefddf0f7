#include "bindings/tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// Containers nested deeper than this are not searched (a cycle must end somewhere).
constexpr int kMaxDepth = 16;

void collect(py::handle value, int depth, std::vector<at::Tensor>& found) {
  if (THPVariable_Check(value.ptr())) {
    found.push_back(THPVariable_Unpack(value.ptr()));
  } else if (depth >= kMaxDepth) {
    return;
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const py::handle part : value) collect(part, depth + 1, found);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(value)) {
      collect(item.second, depth + 1, found);
    }
  } else if (py::hasattr(value, "__dataclass_fields__") && !PyType_Check(value.ptr())) {
    for (const auto& [name, field] : py::dict(value.attr("__dataclass_fields__"))) {
      collect(py::getattr(value, name, py::none()), depth + 1, found);
    }
  }
}

/// The exception, as it comes out of backward(), and its traceback if it has one.
std::pair<py::object, py::object> python_exception_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& python) {
    return {python.value(), python.trace()};  // which may be restored once only
  } catch (...) {
    torch::translate_exception_to_python(error);
  }
  const py::error_already_set python;
  return {python.value(), python.trace()};
}

/// Of a DataPtr that holds a tensor.
void let_go_of_tensor(void* impl) {
  c10::intrusive_ptr<c10::TensorImpl>::reclaim(static_cast<c10::TensorImpl*>(impl));
}

}  // namespace

NamedTensors named(const PythonTensors& tensors) {
  NamedTensors result;
  for (const auto& [name, tensor] : tensors) result.push_back({name, tensor});
  return result;
}

void collect_tensors_of(py::handle value, std::vector<at::Tensor>& found) {
  collect(value, 0, found);
}

at::Tensor alias_of(const at::Tensor& tensor) {
  const std::size_t bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  c10::DataPtr memory(tensor.data_ptr(), at::Tensor(tensor).unsafeReleaseTensorImpl(),
                      &let_go_of_tensor, tensor.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(tensor.options().computeDispatchKey()),
      tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return alias;
}

std::string describe_python_error(const std::exception_ptr& error) {
  const py::gil_scoped_acquire gil;
  try {
    const auto [value, trace] = python_exception_of(error);
    if (trace) PyException_SetTraceback(value.ptr(), trace.ptr());
    const auto module = py::module_::import("libddp.distributed._exit");
    return module.attr("describe")(value).cast<std::string>();
  } catch (const py::error_already_set&) {
    return {};  // its own message is left
  }
}

void rethrow_as_python_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const python_error&) {
    throw;  // of a user's hook
  } catch (...) {
    // below, outside of the handler
  }
  const py::gil_scoped_acquire gil;
  set_python_error(std::move(error));
  python_error python;
  python.persist();
  throw python;
}

}  // namespace libddp
