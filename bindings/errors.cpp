// libddp's C++ exceptions as the Python classes of libddp/errors.py.

#include "libddp/base/error.h"

#include "bindings/bindings.h"
#include "bindings/tensors.h"
#include "libddp/base/first_line.h"
#include "libddp/interop/torch_errors.h"

namespace py = pybind11;

namespace libddp {
namespace {

py::object class_named(const char* name) { return py::module_::import("libddp.errors").attr(name); }

void raise(const char* name, const Error& error) {
  PyErr_SetString(class_named(name).ptr(), error.what());
}

void raise_peer_error(const PeerError& error) {
  py::object type = class_named("PeerError");
  py::object value = type(error.what());
  value.attr("peer_rank") = error.peer_rank();
  value.attr("peer_pid") = error.peer_pid();
  PyErr_SetObject(type.ptr(), value.ptr());
}

/// Sets the Python error for one of libddp's exceptions; any other one goes on to the next
/// translator.
void translate(std::exception_ptr exception) {
  if (!exception) return;
  try {
    std::rethrow_exception(exception);
  } catch (const ErrorCarrier& carrier) {
    translate(carrier.cause());
  } catch (const ArgumentError& error) {
    raise("ArgumentError", error);
  } catch (const StateError& error) {
    raise("StateError", error);
  } catch (const StoreError& error) {
    raise("StoreError", error);
  } catch (const NetworkError& error) {
    raise("NetworkError", error);
  } catch (const TimeoutError& error) {
    raise("TimeoutError", error);
  } catch (const PeerError& error) {
    raise_peer_error(error);
  } catch (const DeviceError& error) {
    raise("DeviceError", error);
  } catch (const SnapshotError& error) {
    raise("SnapshotError", error);
  } catch (const Error& error) {
    raise("Error", error);
  }
}

}  // namespace

// By a call of pybind11's, which asks all translators.
void set_python_error(std::exception_ptr exception) {
  const py::cpp_function thrower([&exception] { std::rethrow_exception(exception); });
  Py_XDECREF(PyObject_CallObject(thrower.ptr(), nullptr));
}

void bind_errors(py::module_&) {
  py::module_::import("libddp.errors");
  // For all modules that share pybind11's internals, torch's too: c10d's own functions then raise
  // our classes.
  py::register_exception_translator(&translate);
  describe_errors_by(&describe_python_error);
}

}  // namespace libddp
