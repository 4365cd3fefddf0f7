#include "bindings/fsdp_faces.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "bindings/bindings.h"
#include "bindings/tensors.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// Attributes of a ShardedParam and of DTensors, made once.
struct Names {
  PyObject* shown = PyUnicode_InternFromString("shown");
  PyObject* spare = PyUnicode_InternFromString("spare");
  PyObject* local_tensor = PyUnicode_InternFromString("_local_tensor");
  PyObject* optimizers = PyUnicode_InternFromString("_in_backward_optimizers");
  PyObject* dict = PyUnicode_InternFromString("__dict__");
};

const Names& names() {
  static const Names made;
  return made;
}

void set(py::handle object, PyObject* name, py::handle value) {
  if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw py::error_already_set();
}

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

struct Row {
  explicit Row(py::handle tuple)
      : param(PyTuple_GET_ITEM(tuple.ptr(), 0)),
        sharded(PyTuple_GET_ITEM(tuple.ptr(), 1)),
        unsharded(PyTuple_GET_ITEM(tuple.ptr(), 2)),
        local(PyTuple_GET_ITEM(tuple.ptr(), 3)),
        places(PyTuple_GET_ITEM(tuple.ptr(), 4)) {}

  const at::Tensor& outer() const { return THPVariable_Unpack(sharded.ptr()); }
  const at::Tensor& inner() const { return THPVariable_Unpack(unsharded.ptr()); }

  py::handle param;
  py::handle sharded;
  py::handle unsharded;
  py::handle local;
  /// Tuples (registry of a module, name in it).
  py::handle places;
};

template <typename Function>
void for_places(const Row& row, const Function& function) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(row.places.ptr()); ++i) {
    PyObject* const place = PyTuple_GET_ITEM(row.places.ptr(), i);
    function(PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1));
  }
}

/// Of the last pass's gradient; what nobody has kept serves the next pass.
void let_go(py::handle param, py::object shown, py::handle nothing) {
  set(param, names().shown, py::none());
  if (shown.ref_count() != 1 || THPVariable_Unpack(shown.ptr()).use_count() != 1) return;
  set(shown, names().local_tensor, nothing);
  set(param, names().spare, shown);
}

/// Whether `grad`, a DTensor, has the memory of the unit's own gradient: a script may have given it
/// another local tensor, as conversions of a module do.
bool shows(const py::object& grad, const at::Tensor& own) {
  const py::object local = attribute_of(grad, names().local_tensor);
  const at::Tensor& tensor = THPVariable_Unpack(local.ptr());
  return tensor.numel() == 0 || tensor.const_data_ptr() == own.const_data_ptr();
}

/// From the object itself: a DTensor's attribute of that name takes microseconds, and the hooks of
/// its TensorImpl stay behind when a conversion swaps tensors.
bool has_late_hooks(py::handle parameter) {
  PyObject* const hooks =
      reinterpret_cast<const THPVariable*>(parameter.ptr())->post_accumulate_grad_hooks;
  if (hooks == nullptr || hooks == Py_None) return false;
  const int has_any = PyObject_IsTrue(hooks);
  if (has_any < 0) throw py::error_already_set();
  return has_any > 0;
}

}  // namespace

py::object attribute_of(py::handle object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

void show_faces(const py::list& rows, bool sharded) {
  for (const py::handle tuple : rows) {
    const Row row(tuple);
    const py::handle shown = sharded ? row.sharded : row.unsharded;
    for_places(row, [&](PyObject* registry, PyObject* key) {
      if (PyDict_SetItem(registry, key, shown.ptr()) != 0) throw py::error_already_set();
    });
  }
}

bool are_faces_settled(const py::list& rows) {
  for (const py::handle tuple : rows) {
    const Row row(tuple);
    if (!attribute_of(row.sharded, names().local_tensor).is(row.local)) return false;
    bool is_there = true;
    for_places(row, [&](PyObject* registry, PyObject* key) {
      is_there = is_there && PyDict_GetItemWithError(registry, key) == row.sharded.ptr();
    });
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (!is_there) return false;
  }
  return true;
}

// In C++ where nothing was changed or the gradient cleared.
void take_over_faces(const py::list& rows, py::handle nothing) {
  for (const py::handle tuple : rows) {
    const Row row(tuple);
    const at::Tensor& outer = row.outer();
    const at::Tensor& inner = row.inner();
    py::object shown = attribute_of(row.param, names().shown);
    const at::Tensor& grad = outer.grad();
    if (outer.requires_grad() != inner.requires_grad()) {
      row.param.attr("take_over")();
    } else if (!grad.defined()) {
      if (!shown.is_none()) let_go(row.param, std::move(shown), nothing);
      if (inner.grad().defined()) inner.mutable_grad() = at::Tensor();
    } else if (shown.is_none() || !THPVariable_Unpack(shown.ptr()).is_same(grad) ||
               !inner.grad().defined() || !shows(shown, inner.grad())) {
      row.param.attr("take_over")();
    }
  }
}

// In C++ where there is a spare DTensor.
void show_face_gradients(const py::list& rows) {
  for (const py::handle tuple : rows) {
    const Row row(tuple);
    const at::Tensor& own = row.inner().grad();
    if (!own.defined()) continue;
    const py::object spare = attribute_of(row.param, names().spare);
    if (spare.is_none() || row.outer().grad().defined()) {
      row.param.attr("show_gradient")();
      continue;
    }
    set(row.param, names().spare, py::none());
    set(spare, names().local_tensor, wrapped(alias_of(own)));
    set(row.param, names().shown, spare);
    row.outer().mutable_grad() = THPVariable_Unpack(spare.ptr());
  }
}

bool have_face_hooks(const py::list& rows) {
  for (const py::handle tuple : rows) {
    const Row row(tuple);
    if (has_late_hooks(row.sharded)) return true;
    const int found =
        PyDict_Contains(attribute_of(row.sharded, names().dict).ptr(), names().optimizers);
    if (found < 0) throw py::error_already_set();
    if (found > 0) return true;
  }
  return false;
}

void bind_fsdp_faces(py::module_& module) {
  module.def("alias_of", &alias_of, py::arg("tensor"));
  module.def("show_faces", &show_faces, py::arg("rows"), py::arg("sharded"));
  module.def("are_faces_settled", &are_faces_settled, py::arg("rows"));
}

}  // namespace libddp
