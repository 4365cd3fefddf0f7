// libddp._C.checkpoint_node: a Python block as one node of autograd's graph.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/activation.h"
#include "libddp/activation/checkpoint_node.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// A Python call whose tensors are given anew each time. Its last owner may be a thread of
/// autograd, so it is held by `Call::Pointer`, which lets go of it under the interpreter lock.
struct Call {
  using Pointer = std::shared_ptr<Call>;

  py::object function;
  py::object name_of;
  std::vector<py::object> args;
  std::vector<std::size_t> places;
  /// Whether a tensor among the arguments is of a class of Python of its own.
  bool has_subclasses = false;

  static Pointer make(py::object function, py::object name_of, const py::tuple& args) {
    auto* call = new Call{std::move(function), std::move(name_of), {}, {}};
    for (py::handle value : args) {
      if (THPVariable_Check(value.ptr())) {
        call->places.push_back(call->args.size());
        call->has_subclasses |= !THPVariable_CheckExact(value.ptr());
      }
      call->args.push_back(py::reinterpret_borrow<py::object>(value));
    }
    return Pointer(call, [](Call* held) {
      const py::gil_scoped_acquire gil;
      delete held;
    });
  }

  /// The tensors among the arguments, which the call lets go of.
  std::vector<at::Tensor> take_tensors() {
    std::vector<at::Tensor> tensors;
    for (std::size_t place : places) {
      tensors.push_back(THPVariable_Unpack(args[place].ptr()));
      args[place] = py::none();
    }
    return tensors;
  }

  py::object run(const std::vector<at::Tensor>& tensors) const {
    py::tuple filled(args.size());
    for (std::size_t i = 0; i < args.size(); ++i) filled[i] = args[i];
    for (std::size_t i = 0; i < places.size(); ++i) {
      filled[places[i]] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[i]));
    }
    auto result =
        py::reinterpret_steal<py::object>(PyObject_Call(function.ptr(), filled.ptr(), nullptr));
    if (result) return result;
    python_error error;
    error.persist();
    throw error;
  }
};

/// A tensor, or those in a tuple; whatever else a block gives carries no gradient.
std::vector<at::Tensor> tensors_in(const py::object& result) {
  if (THPVariable_Check(result.ptr())) return {THPVariable_Unpack(result.ptr())};
  std::vector<at::Tensor> tensors;
  if (!py::isinstance<py::tuple>(result)) return tensors;
  for (py::handle value : py::reinterpret_borrow<py::tuple>(result)) {
    if (THPVariable_Check(value.ptr())) tensors.push_back(THPVariable_Unpack(value.ptr()));
  }
  return tensors;
}

/// A class of Python of its own, which the tensor's data alone would lose.
bool is_of_subclass(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return !THPVariable_CheckExact(object.ptr());
}

/// By the means of its class, which it keeps.
at::Tensor detached(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  PyObject* result = PyObject_CallMethod(object.ptr(), "detach", nullptr);
  if (result != nullptr) return THPVariable_Unpack(py::reinterpret_steal<py::object>(result).ptr());
  python_error error;
  error.persist();
  throw error;
}

/// Inputs that are handed through become tensors of their own by the means of their class.
void replace_inputs(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  for (at::Tensor& output : outputs) {
    const auto is_it = [&](const at::Tensor& input) { return input.is_same(output); };
    if (std::none_of(inputs.begin(), inputs.end(), is_it) || !is_of_subclass(output)) continue;
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(output));
    const py::object view = object.attr("view_as")(object);
    output = THPVariable_Unpack(view.ptr());
  }
}

/// `result` with its tensors replaced.
py::object with_tensors(const py::object& result, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return result;
  if (THPVariable_Check(result.ptr())) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[0]));
  }
  const auto old = py::reinterpret_borrow<py::tuple>(result);
  py::tuple filled(old.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < old.size(); ++i) {
    if (THPVariable_Check(old[i].ptr())) {
      filled[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[next++]));
    } else {
      filled[i] = old[i];
    }
  }
  return filled;
}

/// function(*args) as one node. With `parameters`, their gradients flow in the outer graph; else
/// the inner backward pass accumulates them (reentrant).
py::object checkpoint_node(py::object function, py::object name_of, bool preserve_random,
                           const py::tuple& args, std::vector<at::Tensor> parameters,
                           bool is_reentrant) {
  const Call::Pointer call = Call::make(std::move(function), std::move(name_of), args);
  const std::vector<at::Tensor> inputs = call->take_tensors();
  auto first = std::make_shared<py::object>();
  NodeSettings settings;
  settings.parameters = std::move(parameters);
  settings.preserve_random = preserve_random;
  settings.is_reentrant = is_reentrant;
  settings.must_stay = &is_of_subclass;
  if (call->has_subclasses) settings.detach = &detached;
  settings.name = [call] {
    const py::gil_scoped_acquire gil;
    return call->name_of(call->function).cast<std::string>();
  };
  py::object* result = first.get();
  auto tensors = run_checkpointed(
      [call, first = std::weak_ptr<py::object>(first)](const std::vector<at::Tensor>& now) {
        const py::gil_scoped_acquire gil;
        py::object value = call->run(now);
        std::vector<at::Tensor> found = tensors_in(value);
        // In the forward pass, what is no tensor is wanted too.
        if (const auto wanted = first.lock()) {
          *wanted = std::move(value);
          replace_inputs(found, now);
        }
        return found;
      },
      inputs, std::move(settings));
  return with_tensors(*result, tensors);
}

}  // namespace

void bind_activation_node(py::module_& module) {
  module.def("checkpoint_node", &checkpoint_node, py::arg("function"), py::arg("name_of"),
             py::arg("preserve_random"), py::arg("args"),
             py::arg("parameters") = std::vector<at::Tensor>(), py::arg("is_reentrant") = true,
             "Calls a block as one node of the graph, which runs it again in backward.");
}

}  // namespace libddp
