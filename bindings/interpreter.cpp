// What libddp and the Python interpreter must know of each other.

#include <pthread.h>

#include <chrono>
#include <string>

#include "bindings/bindings.h"
#include "bindings/python_stacks.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/stack_dump.h"
#include "libddp/group/group_deleter.h"
#include "libddp/interop/c10d_waiters.h"
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

/// The end of a group waits for threads that may be about to free a tensor that Python knows, for
/// which they need the interpreter lock.
void delete_without_lock(ProcessGroup* group) {
  CallbackThread::release(group);
  if (Py_IsInitialized() && PyGILState_Check()) {
    const py::gil_scoped_release release;
    delete group;
  } else {
    delete group;
  }
}

/// Never freed: a watchdog's thread may ask while the process ends.
PythonStacks& stacks_of_threads() {
  static auto* const stacks = new PythonStacks();
  return *stacks;
}

/// Well below the time in which a question for another rank's stacks must be answered.
constexpr std::chrono::milliseconds kLockTime{200};

std::string python_stacks() { return stacks_of_threads().read(kLockTime); }

}  // namespace

void bind_interpreter(py::module_& module) {
  py::object threading = py::module_::import("threading");
  main_thread =
      static_cast<pthread_t>(threading.attr("main_thread")().attr("ident").cast<unsigned long>());
  set_interrupt_hook(&run_python_signal_handlers);
  set_group_deleter(&delete_without_lock);
  set_stack_dumper(&python_stacks);
  module.def(
      "dump_stacks", [] { return dump_stacks(); }, py::call_guard<py::gil_scoped_release>(),
      "Where the threads of this process are, as a failure's report shows it: text in the form of\n"
      "faulthandler's, the main thread last.");

  // Futures may call into Python: their thread must end while there is an interpreter. So must what
  // lets go of tensors.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release release;
    C10dWaiters::settle_all();
    CallbackThread::stop_all();
    set_stack_dumper(nullptr);
    stacks_of_threads().stop();
  }));
}

}  // namespace libddp
