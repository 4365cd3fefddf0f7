// Which group takes a hot call (libddp.distributed._collectives) without a detour over torch's
// function. It is asked before every collective, where Python takes as long as the rest of the
// call.

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "bindings/bindings.h"
#include "libddp/group/process_group.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// What Python has given, for ever, and the group that was asked for last.
/// Thread rule: with the interpreter lock.
struct Straight {
  /// The module torch.distributed.distributed_c10d.
  py::object c10d;
  /// libddp.distributed._groups.find, and the answers that it keeps.
  py::object find;
  py::object natives;
  py::object parameter;

  PyObject* world = PyUnicode_InternFromString("_world");
  PyObject* default_group = PyUnicode_InternFromString("default_pg");
  PyObject* coalescing = PyUnicode_InternFromString("pg_coalesce_state");

  /// The group that was asked for last, as long as it lives; null: none.
  PyObject* group = nullptr;
  /// Forgets it when it ends.
  py::object end_of_group;
  py::object native;
  const ProcessGroup* moves = nullptr;
};

Straight& known() {
  // Never destroyed: the interpreter may have ended by then.
  static auto* const made = new Straight;
  return *made;
}

void forget() {
  Straight& self = known();
  self.group = nullptr;
  self.moves = nullptr;
  self.native = py::object();
  self.end_of_group = py::object();
}

py::object attribute(py::handle object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object look_up(py::handle group) {
  Straight& self = known();
  py::object native = self.find(group);
  // Others than these have another answer each time.
  if (native.is_none() || !self.natives.contains(group)) return native;
  forget();
  self.end_of_group = py::weakref(group, py::cpp_function([](py::handle) { forget(); }));
  self.group = group.ptr();
  self.native = native;
  self.moves = native.cast<const ProcessGroup*>();
  return native;
}

bool is_plain(py::handle tensor) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  return type == THPVariableClass || type == known().parameter.ptr();
}

py::object straight(py::handle given, py::handle tensor) {
  Straight& self = known();
  const py::object world = attribute(self.c10d, self.world);
  py::object group = py::reinterpret_borrow<py::object>(given);
  if (group.is_none()) group = attribute(world, self.default_group);
  const bool is_known = self.group != nullptr && self.group == group.ptr();
  py::object native = is_known ? self.native : look_up(group);
  if (native.is_none() || !is_plain(tensor)) return py::none();
  const ProcessGroup* const moves = is_known ? self.moves : native.cast<const ProcessGroup*>();
  const at::Tensor& value = THPVariable_Unpack(tensor.ptr());
  if (!value.is_cpu() && !moves->moves(value.device().type())) return py::none();
  if (py::bool_(attribute(world, self.coalescing))) return py::none();
  return native;
}

PyObject* straight_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "straight(group, tensor)");
    return nullptr;
  }
  try {
    return straight(arguments[0], arguments[1]).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyMethodDef straight_method{
    "straight", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&straight_call)),
    METH_FASTCALL,
    "straight(group, tensor): the ProcessGroup that takes the call, or None where torch has to."};

}  // namespace

void bind_straight(py::module_& module) {
  module.def(
      "prepare_straight",
      [](py::object c10d, py::object find, py::object natives, py::object parameter) {
        Straight& self = known();
        self.c10d = std::move(c10d);
        self.find = std::move(find);
        self.natives = std::move(natives);
        self.parameter = std::move(parameter);
      },
      py::arg("c10d"), py::arg("find"), py::arg("natives"), py::arg("parameter"),
      "What `straight` asks. Once.");
  module.def("forget_straight", &forget, "The answer for a group has changed.");
  PyObject* const function = PyCFunction_NewEx(&straight_method, nullptr, nullptr);
  if (function == nullptr) throw py::error_already_set();
  module.attr("straight") = py::reinterpret_steal<py::object>(function);
}

}  // namespace libddp
