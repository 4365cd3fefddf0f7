#pragma once

// A child that stops before it begins, for ptrace to count its steps.
//
//   const pid_t child = traced([&] { save(); });
//   ::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr);

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace libddp::test {

template <class Work>
pid_t traced(Work&& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    ::raise(SIGSTOP);
    try {
      work();
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) {
    throw std::runtime_error("the child did not stop");
  }
  return child;
}

}  // namespace libddp::test
