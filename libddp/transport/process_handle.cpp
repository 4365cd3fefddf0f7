#include "libddp/transport/process_handle.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "libddp/base/deadline.h"
#include "libddp/base/process.h"
#include "libddp/transport/unix_socket.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5; older headers lack the name.
#endif

namespace libddp {
namespace {

// One number on all architectures; older headers lack the names.
constexpr long kPidfdSendSignal = 424;
constexpr long kPidfdOpen = 434;
/// Between two looks at a process that nothing tells of.
constexpr std::chrono::milliseconds kLook{5};

}  // namespace

ProcessHandle::ProcessHandle(pid_t pid) : pidfd_(static_cast<int>(::syscall(kPidfdOpen, pid, 0))) {
  if (pidfd_) return;
  if (errno == ESRCH) {
    is_gone_ = true;
  } else {
    *this = by_id(pid);
  }
}

ProcessHandle ProcessHandle::of_peer(int socket) {
  ProcessHandle handle;
  int pidfd = -1;
  socklen_t length = sizeof(pidfd);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &length) == 0) {
    handle.pidfd_ = UniqueFd(pidfd);
    return handle;
  }
  // Without SO_PEERPIDFD the number could in theory have been taken over by another process.
  const pid_t pid = peer_credentials(socket).pid;
  return pid > 0 ? ProcessHandle(pid) : ProcessHandle();
}

ProcessHandle ProcessHandle::by_id(pid_t pid) {
  ProcessHandle handle;
  handle.pid_ = pid;
  handle.begin_ = process_begin(pid);
  handle.is_gone_ = handle.begin_.empty() && ::kill(pid, 0) != 0 && errno == ESRCH;
  return handle;
}

bool ProcessHandle::has_ended_by_id() const {
  const char state = process_state(pid_);
  return state == 'Z' || state == 'X' || process_begin(pid_) != begin_;
}

bool ProcessHandle::has_ended(std::chrono::milliseconds wait) const {
  if (pidfd_) {
    pollfd entry{pidfd_.get(), POLLIN, 0};
    return ::poll(&entry, 1, static_cast<int>(wait.count())) == 1 && (entry.revents & POLLIN) != 0;
  }
  if (begin_.empty()) return is_gone_;
  for (const Deadline deadline = Deadline::after(wait); !has_ended_by_id();) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

void ProcessHandle::signal(int number) const {
  if (pidfd_) {
    ::syscall(kPidfdSendSignal, pidfd_.get(), number, nullptr, 0);
  } else if (!begin_.empty() && !has_ended_by_id()) {
    ::kill(pid_, number);
  }
}

}  // namespace libddp
