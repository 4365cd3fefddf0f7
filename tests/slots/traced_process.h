#pragma once

// A child that stops before it begins, for ptrace to count its steps.
//
//   const pid_t child = traced([&] { save(); });
//   ::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr);    // or
//   const std::optional<int> end = run_to_change(child);     // its wait status, if it has ended

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
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

/// Of system calls, those that leave every file as it is; to die before one of them is to die
/// before the next one.
inline bool leaves_files_alone(std::uint64_t call) {
  constexpr long kCalls[] = {
      SYS_brk,          SYS_mmap,           SYS_munmap,      SYS_mremap,        SYS_mprotect,
      SYS_madvise,      SYS_futex,          SYS_read,        SYS_pread64,       SYS_fstat,
      SYS_lseek,        SYS_newfstatat,     SYS_statx,       SYS_close,         SYS_getdents64,
      SYS_memfd_create, SYS_fcntl,          SYS_getrandom,   SYS_getpid,        SYS_gettid,
      SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_uname,       SYS_clock_gettime, SYS_statfs,
      SYS_fstatfs,      SYS_sigaltstack,    SYS_sched_yield, SYS_prctl,         SYS_getrusage,
      SYS_prlimit64,
  };
  return std::find(std::begin(kCalls), std::end(kCalls), static_cast<long>(call)) !=
         std::end(kCalls);
}

/// Runs a traced process up to the beginning of its next system call that may change a file; the
/// status that waitpid gave, if it has ended before.
inline std::optional<int> run_to_change(pid_t child) {
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD);  // else no information
  while (true) {
    int status = 0;
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    ::waitpid(child, &status, 0);
    if (!WIFSTOPPED(status)) return status;
    __ptrace_syscall_info info{};
    if (::ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof(info), &info) < 0) {
      throw std::runtime_error("the kernel does not tell which system call it is");
    }
    const bool begins = info.op == PTRACE_SYSCALL_INFO_ENTRY;
    if (begins && !leaves_files_alone(info.entry.nr)) return std::nullopt;
  }
}

}  // namespace libddp::test
