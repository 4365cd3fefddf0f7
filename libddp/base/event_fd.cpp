#include "libddp/base/event_fd.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"

namespace libddp {

EventFd EventFd::create() {
  EventFd made;
  made.fd_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made.fd_) throw Error("libddp: " + errno_text("eventfd", errno));
  return made;
}

void EventFd::set() noexcept {
  const std::uint64_t one = 1;
  // Cannot fail: the counter takes 2^64 - 2 of these.
  static_cast<void>(!::write(fd_.get(), &one, sizeof(one)));
}

void EventFd::clear() noexcept {
  std::uint64_t count = 0;
  static_cast<void>(!::read(fd_.get(), &count, sizeof(count)));
}

}  // namespace libddp
