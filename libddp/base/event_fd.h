#pragma once

// A descriptor that is readable from `set` to `clear`: ends a poll() from another thread.
// Thread rule: any thread.
//
//   EventFd stop = EventFd::create();
//   poll({{stop.fd(), POLLIN, 0}, ...});          // elsewhere: stop.set()

#include "libddp/base/unique_fd.h"

namespace libddp {

class EventFd {
 public:
  /// None: fd() is -1, which poll passes over.
  EventFd() = default;
  /// Throws Error where the system has no descriptors.
  static EventFd create();

  int fd() const { return fd_.get(); }
  void set() noexcept;
  void clear() noexcept;

 private:
  UniqueFd fd_;
};

}  // namespace libddp
