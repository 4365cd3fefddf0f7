#include "bindings/python_stacks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string_view>
#include <thread>
#include <utility>

#include "bindings/bindings.h"
#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"

namespace py = pybind11;

namespace libddp {
namespace {

// faulthandler's own function: it needs no lock of the interpreter, so that it also tells where a
// thread is that holds the lock and hangs. Private, hence looked up: Pythons from 3.13 on do
// not export it.
using DumpThreads = const char* (*)(int, PyInterpreterState*, PyThreadState*);

DumpThreads dump_function() {
  static const auto dump =
      reinterpret_cast<DumpThreads>(::dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  return Py_IsInitialized() ? dump : nullptr;
}

std::string text_of(const UniqueFd& file) {
  constexpr std::size_t kMaxBytes = 64u << 10;
  std::string text(kMaxBytes, '\0');
  const ssize_t size = ::pread(file.get(), text.data(), text.size(), 0);
  text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return text;
}

/// What Python offers in its place to who has the lock.
std::string walk_by_faulthandler(const UniqueFd& file) {
  try {
    py::module_::import("faulthandler").attr("dump_traceback")(file.get(), /*all_threads=*/true);
  } catch (const py::error_already_set&) {
    return "";
  }
  std::string text = text_of(file);
  constexpr std::string_view kCaller = "Current thread ";
  const std::size_t begin = text.find(kCaller);
  return begin == std::string::npos ? text : text.replace(begin, kCaller.size(), "Thread ");
}

/// REQUIRES: the interpreter lock.
std::string walk_threads() {
  if (!Py_IsInitialized()) return "";
  const UniqueFd file(::memfd_create("libddp-stacks", MFD_CLOEXEC));
  if (!file) return "";
  const DumpThreads dump = dump_function();
  if (dump == nullptr) return walk_by_faulthandler(file);
  dump(file.get(), PyInterpreterState_Main(), nullptr);
  return text_of(file);
}

/// In the copy: nothing but what a signal handler may do, and no word to the outside if it crashes.
[[noreturn]] void walk_and_exit(DumpThreads dump, int file, PyInterpreterState* interpreter) {
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) ::signal(number, SIG_DFL);
  ::prctl(PR_SET_DUMPABLE, 0);
  dump(file, interpreter, nullptr);
  ::syscall(SYS_exit_group, 0);
  __builtin_unreachable();
}

/// True if it ended in order by the deadline; it is gone in any case.
bool ends_well(pid_t copy, Deadline deadline) {
  constexpr useconds_t kNapUs = 2000;
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(copy, &status, __WALL | WNOHANG);
    if (ended == copy) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (ended < 0 && errno != EINTR) return false;
    if (deadline.expired()) break;
    ::usleep(kNapUs);
  }
  ::kill(copy, SIGKILL);
  while (::waitpid(copy, nullptr, __WALL) < 0 && errno == EINTR) continue;
  return false;
}

/// The stacks as they were when this was called, whoever holds the interpreter lock: of a copy of
/// the process in which no thread runs. Empty where that copy could not be made or walked.
std::string walk_copy(std::chrono::milliseconds limit) {
  const DumpThreads dump = dump_function();
  if (dump == nullptr) return "";
  const UniqueFd file(::memfd_create("libddp-stacks", MFD_CLOEXEC));
  if (!file) return "";
  PyInterpreterState* const interpreter = PyInterpreterState_Main();
  // Not fork(): its handlers take locks, and the program would be told of a child that is none of
  // its own (no signal at its end, and no wait() for any child sees it).
  const auto copy = static_cast<pid_t>(::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
  if (copy == 0) walk_and_exit(dump, file.get(), interpreter);
  return copy > 0 && ends_well(copy, Deadline::after(limit)) ? text_of(file) : "";
}

/// Without the part of the calling thread, which is there to look and is in no Python code.
std::string without_this_thread(std::string text) {
  char head[32];
  std::snprintf(head, sizeof head, "Thread 0x%016lx", static_cast<unsigned long>(pthread_self()));
  const std::size_t begin = text.find(head);
  if (begin == std::string::npos) return text;
  const std::size_t end = text.find("\n\n", begin);
  return text.erase(begin, end == std::string::npos ? end : end + 2 - begin);
}

}  // namespace

void PythonStacks::read_with_lock() {
  std::string text;
  {
    const py::gil_scoped_acquire gil;
    text = without_this_thread(walk_threads());
  }
  const std::lock_guard lock(mutex_);
  text_ = std::move(text);
  is_reading_ = false;
  changed_.notify_all();
}

std::string PythonStacks::read(std::chrono::milliseconds limit) {
  if (PyGILState_Check()) return walk_threads();
  if (pid_ != ::getpid()) return "";
  std::unique_lock lock(mutex_);
  if (is_stopped_) return "";
  if (!is_reading_) {
    is_reading_ = true;
    std::thread(&PythonStacks::read_with_lock, this).detach();
  }
  if (changed_.wait_for(lock, limit, [this] { return !is_reading_; })) return text_;
  lock.unlock();
  return without_this_thread(walk_copy(limit));
}

void PythonStacks::stop() {
  if (pid_ != ::getpid()) return;
  std::unique_lock lock(mutex_);
  is_stopped_ = true;
  changed_.wait(lock, [this] { return !is_reading_; });
}

}  // namespace libddp
