#include "bindings/saved_slot.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <new>
#include <utility>

#include "libddp/activation/checkpoint_error.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// What the pack hook is bound to. `pass` is null in a forward pass.
struct HookTarget {
  PyObject_HEAD std::shared_ptr<Frame> frame;
  std::shared_ptr<ReplayPass> pass;
};

/// What the graph keeps in a saved tensor's stead. In a replay's own graph, the tensor itself.
struct SavedSlot {
  PyObject_HEAD std::shared_ptr<Frame> frame;
  at::Tensor tensor;
  std::uint32_t slot;
};

template <typename Object>
void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if constexpr (std::is_same_v<Object, SavedSlot>) {
    auto* slot = reinterpret_cast<SavedSlot*>(self);
    if (!slot->tensor.defined()) slot->frame->release(slot->slot);
  }
  // What it holds may run Python code when it goes; the object itself is then still whole.
  reinterpret_cast<Object*>(self)->~Object();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Object>
PyTypeObject* make_type(const char* name) {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&destroy<Object>)},
                                {0, nullptr}};
  PyType_Spec spec = {name, sizeof(Object), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

/// A new object with default members. The head stays as the interpreter has set it.
template <typename Object>
Object* make(PyTypeObject* type) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) throw py::error_already_set();
  auto* object = reinterpret_cast<Object*>(self);
  if constexpr (std::is_same_v<Object, SavedSlot>) {
    new (&object->frame) std::shared_ptr<Frame>();
    new (&object->tensor) at::Tensor();
  } else {
    new (&object->frame) std::shared_ptr<Frame>();
    new (&object->pass) std::shared_ptr<ReplayPass>();
  }
  return object;
}

SavedSlot* make_slot(const std::shared_ptr<Frame>& frame) {
  static PyTypeObject* type = make_type<SavedSlot>("libddp._C.SavedSlot");
  auto* slot = make<SavedSlot>(type);
  slot->frame = frame;
  return slot;
}

PyObject* pack_forward(PyObject* self, PyObject* tensor) {
  try {
    const std::shared_ptr<Frame>& frame = reinterpret_cast<HookTarget*>(self)->frame;
    const std::uint32_t number = frame->pack(THPVariable_Unpack(tensor));
    SavedSlot* slot = make_slot(frame);
    slot->slot = number;
    return reinterpret_cast<PyObject*>(slot);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyObject* pack_replay(PyObject* self, PyObject* tensor) {
  try {
    auto* target = reinterpret_cast<HookTarget*>(self);
    at::Tensor plain = target->pass->pack(THPVariable_Unpack(tensor));
    if (target->pass->is_stopped()) {
      PyErr_SetNone(stop_replay_type());
      return nullptr;
    }
    SavedSlot* slot = make_slot(target->frame);
    slot->tensor = std::move(plain);
    return reinterpret_cast<PyObject*>(slot);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyObject* unpack(PyObject*, PyObject* object) {
  try {
    auto* slot = reinterpret_cast<SavedSlot*>(object);
    if (slot->tensor.defined()) return THPVariable_Wrap(slot->tensor);
    return THPVariable_Wrap(slot->frame->unpack(slot->slot));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef kPackForward = {"pack", &pack_forward, METH_O, nullptr};
PyMethodDef kPackReplay = {"pack_replay", &pack_replay, METH_O, nullptr};
PyMethodDef kUnpack = {"unpack", &unpack, METH_O, nullptr};

/// One for all: the slot knows its frame. New reference.
PyObject* unpack_function() {
  static PyObject* function = PyCFunction_New(&kUnpack, nullptr);
  Py_INCREF(function);
  return function;
}

}  // namespace

HookScope::HookScope(const std::shared_ptr<Frame>& frame, const std::shared_ptr<ReplayPass>& pass) {
  static PyTypeObject* type = make_type<HookTarget>("libddp._C.HookTarget");
  auto* target = make<HookTarget>(type);
  target->frame = frame;
  target->pass = pass;
  PyObject* self = reinterpret_cast<PyObject*>(target);
  PyObject* pack = PyCFunction_New(pass ? &kPackReplay : &kPackForward, self);
  Py_DECREF(self);
  if (pack == nullptr) throw py::error_already_set();
  c10::SafePyObject safe_pack(pack, getPyInterpreter());
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(std::move(safe_pack),
                                          {unpack_function(), getPyInterpreter()});
}

HookScope::~HookScope() { at::SavedTensorDefaultHooks::pop_hooks(); }

PyObject* stop_replay_type() {
  static PyObject* type =
      PyErr_NewExceptionWithDoc("libddp._C.StopReplay", "A replayed block has gone far enough.",
                                PyExc_BaseException, nullptr);
  return type;
}

void set_python_error() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const CheckpointError& error) {
    const py::object type = py::module_::import("libddp.utils.checkpoint").attr("CheckpointError");
    PyErr_SetString(type.ptr(), error.what());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace libddp
