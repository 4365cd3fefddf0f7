#include "bindings/activation_errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "libddp/activation/checkpoint_error.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// REQUIRES: within a catch block.
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

[[noreturn]] void throw_set_error() {
  python_error error;
  error.persist();
  throw error;
}

}  // namespace

PyObject* stop_replay_type() {
  static PyObject* type =
      PyErr_NewExceptionWithDoc("libddp._C.StopReplay", "A replayed block has gone far enough.",
                                PyExc_BaseException, nullptr);
  return type;
}

void throw_python_error() {
  const py::gil_scoped_acquire gil;
  set_python_error();
  throw_set_error();
}

void throw_stop_replay() {
  const py::gil_scoped_acquire gil;
  PyErr_SetNone(stop_replay_type());
  throw_set_error();
}

}  // namespace libddp
