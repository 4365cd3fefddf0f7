#pragma once

// Who and where this process is, and whether it was forked since something was made.
// Thread rule: any thread.
//
//   ProcessStamp made;                        // member of an object that owns threads or locks
//   if (!made.is_current()) throw StateError("made before fork");

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace libddp {

/// Name of this machine (inside a container, the container's).
std::string host_name();

/// Random id that the kernel draws at boot: equal for all processes and containers of one machine.
/// Empty where the system does not show one.
std::string boot_id();

/// Which machine this is: what LIBDDP_HOST_ID says (clones of one machine have one boot id), else
/// the boot id.
std::string machine_id();

/// Identity of the network namespace, in which abstract socket names are valid. Empty where the
/// system does not show one.
std::string network_namespace();

/// Identity of the namespace in which process ids are valid; empty as above.
std::string pid_namespace();

/// What the kernel says of a process of this pid namespace: 'R', 'S', 'D', 'T' (stopped by a
/// signal), 't' (held by a debugger), 'Z', ... (proc(5)); 0 where it says nothing.
char process_state(pid_t pid);

/// When a process of this pid namespace began, as the kernel counts it, so that its id is not taken
/// for that of a later one; empty where it says nothing.
std::string process_begin(pid_t pid);

/// Number of fork() calls between the first call of this function and this process.
/// A counter, not getpid(): no system call, and cheap enough for hot paths.
std::uint64_t fork_generation();

/// Remembers the process in which it was made. A child of fork() shares none of its parent's
/// threads and must not touch locks that a thread may have held at the fork.
class ProcessStamp {
 public:
  ProcessStamp() : generation_(fork_generation()) {}

  bool is_current() const { return generation_ == fork_generation(); }

 private:
  std::uint64_t generation_;
};

}  // namespace libddp
