// Which group takes a hot call (libddp.distributed._collectives) without a detour over torch's
// function, and the hottest of these calls themselves. Before and after a collective Python takes
// as long as the rest of the call: so these are plain functions of CPython's, which find their
// arguments in an array.

#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <span>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "libddp/group/process_group.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// c10d's `_world`, of which tests of torch's make others, and the names of what it has: the fields
/// behind the properties where they are there, because a property is a call of a function in
/// Python.
struct World {
  py::object object;
  PyObject* default_group = nullptr;
  PyObject* coalescing = nullptr;
};

/// What Python has given, for ever, and the group that was asked for last.
/// Thread rule: with the interpreter lock.
struct Straight {
  /// The module torch.distributed.distributed_c10d.
  py::object c10d;
  /// libddp.distributed._groups.find, and the answers that it keeps.
  py::object find;
  py::object natives;
  py::object parameter;

  PyObject* world_name = PyUnicode_InternFromString("_world");
  World world;

  /// The group that was asked for last, as long as it lives; null: none.
  PyObject* group = nullptr;
  /// Forgets it when it ends.
  py::object end_of_group;
  py::object native;
  ProcessGroup* native_group = nullptr;
};

/// The group that takes a call; null where torch has to.
struct Taker {
  py::object native;
  ProcessGroup* group = nullptr;
};

Straight& known() {
  // Never destroyed: the interpreter may have ended by then.
  static auto* const made = new Straight;
  return *made;
}

void forget() {
  Straight& self = known();
  self.group = nullptr;
  self.native_group = nullptr;
  self.native = py::object();
  self.end_of_group = py::object();
}

py::object attribute(py::handle object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

PyObject* field_or_property(py::handle world, const char* field, const char* property) {
  return PyUnicode_InternFromString(py::hasattr(world, field) ? field : property);
}

World current_world() {
  Straight& self = known();
  py::object object = attribute(self.c10d, self.world_name);
  if (!self.world.object.is(object)) {
    self.world = {object, field_or_property(object, "_default_pg", "default_pg"),
                  field_or_property(object, "_pg_coalesce_state", "pg_coalesce_state")};
  }
  return self.world;
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
  self.native_group = native.cast<ProcessGroup*>();
  return native;
}

bool is_plain(py::handle tensor) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  return type == THPVariableClass || type == known().parameter.ptr();
}

Taker taker_of(py::handle given, py::handle tensor) {
  Straight& self = known();
  const World world = current_world();
  py::object group = py::reinterpret_borrow<py::object>(given);
  if (group.is_none()) group = attribute(world.object, world.default_group);
  const bool is_known = self.group != nullptr && self.group == group.ptr();
  py::object native = is_known ? self.native : look_up(group);
  if (native.is_none() || !is_plain(tensor)) return {};
  ProcessGroup* const found = is_known ? self.native_group : native.cast<ProcessGroup*>();
  const at::Tensor& value = THPVariable_Unpack(tensor.ptr());
  if (!value.is_cpu() && !found->moves(value.device().type())) return {};
  if (py::bool_(attribute(world.object, world.coalescing))) return {};
  return {std::move(native), found};
}

using Arguments = std::span<PyObject* const>;

bool is_true(py::handle value) {
  const int answer = PyObject_IsTrue(value.ptr());
  if (answer < 0) throw py::error_already_set();
  return answer != 0;
}

py::object torch_has_to() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

/// straight(group, tensor)
py::object straight(Arguments given) {
  Taker taker = taker_of(given[0], given[1]);
  return taker.group == nullptr ? py::none() : std::move(taker.native);
}

/// straight_all_reduce(group, tensor, op, async_op)
py::object straight_all_reduce(Arguments given) {
  const Taker taker = taker_of(given[0], given[1]);
  if (taker.group == nullptr) return torch_has_to();
  // A reference of its own: meanwhile other threads may put another tensor behind that object.
  const at::Tensor tensor = THPVariable_Unpack(given[1]);
  if (tensor.is_sparse()) return torch_has_to();
  return all_reduce(*taker.group, tensor, given[2], is_true(given[3]), {}, {});
}

/// straight_all_gather_into(group, output, input, async_op)
py::object straight_all_gather_into(Arguments given) {
  const Taker taker = taker_of(given[0], given[2]);
  if (taker.group == nullptr || !is_plain(given[1])) return torch_has_to();
  const at::Tensor output = THPVariable_Unpack(given[1]);
  const at::Tensor input = THPVariable_Unpack(given[2]);
  return all_gather_into(*taker.group, output, input, is_true(given[3]), {});
}

/// straight_reduce_scatter_into(group, output, input, op, async_op)
py::object straight_reduce_scatter_into(Arguments given) {
  const Taker taker = taker_of(given[0], given[1]);
  if (taker.group == nullptr || !is_plain(given[2])) return torch_has_to();
  const at::Tensor output = THPVariable_Unpack(given[1]);
  const at::Tensor input = THPVariable_Unpack(given[2]);
  return reduce_scatter_into(*taker.group, output, input, given[3], is_true(given[4]), {});
}

/// `body` as a function of CPython's. REQUIRES: as many arguments as it takes, which are
/// libddp.distributed._collectives' own.
template <py::object (*body)(Arguments), std::size_t kCount>
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != kCount) {
    PyErr_Format(PyExc_TypeError, "libddp: %zd arguments, where it takes %zu", count, kCount);
    return nullptr;
  }
  try {
    return body({arguments, kCount}).release().ptr();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

template <py::object (*body)(Arguments), std::size_t kCount>
PyMethodDef method(const char* name, const char* text) {
  auto* const function = reinterpret_cast<void (*)()>(&call<body, kCount>);
  return {name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, text};
}

PyMethodDef methods[] = {
    method<&straight, 2>("straight",
                         "(group, tensor): the ProcessGroup that takes the call, or "
                         "None where torch has to."),
    method<&straight_all_reduce, 4>("straight_all_reduce",
                                    "(group, tensor, op, async_op): the call itself; "
                                    "NotImplemented where torch has to."),
    method<&straight_all_gather_into, 4>("straight_all_gather_into",
                                         "(group, output, input, async_op): the same."),
    method<&straight_reduce_scatter_into, 5>("straight_reduce_scatter_into",
                                             "(group, output, input, op, async_op): the same."),
};

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
  for (PyMethodDef& method : methods) {
    PyObject* const function = PyCFunction_NewEx(&method, nullptr, nullptr);
    if (function == nullptr) throw py::error_already_set();
    module.attr(method.ml_name) = py::reinterpret_steal<py::object>(function);
  }
}

}  // namespace libddp
