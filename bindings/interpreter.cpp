// What libddp and the Python interpreter must know of each other.

#include <pthread.h>

#include "bindings/bindings.h"
#include "libddp/base/interrupt.h"
#include "libddp/interop/callback_thread.h"

namespace py = pybind11;

namespace libddp {
namespace {

pthread_t main_thread;

/// Python runs signal handlers in its main thread only; so a wait there must look.
void run_python_signal_handlers() {
  if (!pthread_equal(pthread_self(), main_thread)) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_interpreter(py::module_&) {
  py::object threading = py::module_::import("threading");
  main_thread =
      static_cast<pthread_t>(threading.attr("main_thread")().attr("ident").cast<unsigned long>());
  set_interrupt_hook(&run_python_signal_handlers);

  // Futures may call into Python: their thread must end while there is an interpreter.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release release;
    CallbackThread::stop_all();
  }));
}

}  // namespace libddp
