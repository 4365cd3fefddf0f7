#include "bindings/python_stacks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <thread>
#include <utility>

#include "bindings/bindings.h"
#include "libddp/base/unique_fd.h"

namespace py = pybind11;

namespace libddp {
namespace {

// faulthandler's own function: it needs no lock of the interpreter, so that it also tells where a
// thread is that holds the lock and hangs. Private, hence looked up: without it there are no
// stacks.
using DumpThreads = const char* (*)(int, PyInterpreterState*, PyThreadState*);

std::string walk_threads() {
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
  if (pid_ != ::getpid()) return walk_threads();
  std::unique_lock lock(mutex_);
  if (is_stopped_) return "";
  if (!is_reading_) {
    is_reading_ = true;
    std::thread(&PythonStacks::read_with_lock, this).detach();
  }
  if (changed_.wait_for(lock, limit, [this] { return !is_reading_; })) return text_;
  return walk_threads();
}

void PythonStacks::stop() {
  if (pid_ != ::getpid()) return;
  std::unique_lock lock(mutex_);
  is_stopped_ = true;
  changed_.wait(lock, [this] { return !is_reading_; });
}

}  // namespace libddp
