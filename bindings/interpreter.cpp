// What libddp and the Python interpreter must know of each other.

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "bindings/bindings.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/stack_dump.h"
#include "libddp/base/unique_fd.h"
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

// faulthandler's own function: it needs no lock of the interpreter, so that it also tells where a
// thread is that holds the lock and hangs. Private, hence looked up: without it there are no
// stacks.
using DumpThreads = const char* (*)(int, PyInterpreterState*, PyThreadState*);

std::string python_stacks() {
  static const auto dump =
      reinterpret_cast<DumpThreads>(::dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  if (dump == nullptr || !Py_IsInitialized()) return "";
  const UniqueFd file(::memfd_create("libddp-stacks", MFD_CLOEXEC));
  if (!file) return "";
  dump(file.get(), PyInterpreterState_Main(), nullptr);
  constexpr std::size_t kMaxBytes = 64u << 10;
  std::string text(kMaxBytes, '\0');
  const ssize_t size = ::pread(file.get(), text.data(), text.size(), 0);
  text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return text;
}

}  // namespace

void bind_interpreter(py::module_&) {
  py::object threading = py::module_::import("threading");
  main_thread =
      static_cast<pthread_t>(threading.attr("main_thread")().attr("ident").cast<unsigned long>());
  set_interrupt_hook(&run_python_signal_handlers);
  set_stack_dumper(&python_stacks);

  // Futures may call into Python: their thread must end while there is an interpreter.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release release;
    CallbackThread::stop_all();
    set_stack_dumper(nullptr);
  }));
}

}  // namespace libddp
