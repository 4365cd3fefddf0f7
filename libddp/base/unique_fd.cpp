#include "libddp/base/unique_fd.h"

#include <unistd.h>

#include "libddp/base/parent_only.h"

namespace libddp {

void UniqueFd::reset(int fd) {
  // Linux closes the descriptor also when close() reports EINTR: calling it again could close a
  // descriptor that another thread has just opened.
  if (fd_ >= 0) {
    keep_in_children(fd_);  // before the number can be another's
    ::close(fd_);
  }
  fd_ = fd;
}

}  // namespace libddp
