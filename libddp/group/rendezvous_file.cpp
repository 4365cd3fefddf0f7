#include "libddp/group/rendezvous_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "libddp/base/log.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"

namespace libddp {
namespace {

/// How many have left the file with this inode; a count of an earlier run's file is void.
struct Record {
  ino_t inode = 0;
  int num_left = 0;
};

/// Counts this rank under the file's lock; 0 or errno.
int leave(const std::string& path, const std::string& count_path, int world_size) {
  const UniqueFd count(::open(count_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!count) return errno;
  while (::flock(count.get(), LOCK_EX) != 0) {
    if (errno != EINTR) return errno;
  }
  struct stat file {};
  if (::stat(path.c_str(), &file) != 0) return errno;
  Record record;
  if (::pread(count.get(), &record, sizeof(record), 0) != sizeof(record) ||
      record.inode != file.st_ino) {
    record = {file.st_ino, 0};
  }
  ++record.num_left;
  if (record.num_left >= world_size) {
    ::unlink(path.c_str());
    ::unlink(count_path.c_str());
    return 0;
  }
  return ::pwrite(count.get(), &record, sizeof(record), 0) == sizeof(record) ? 0 : errno;
}

}  // namespace

LeavingCount::~LeavingCount() {
  const int error = leave(path_, path_ + ".left", world_size_);
  if (error != 0) {
    log(LogLevel::Warn, "rendezvous_file_left_behind",
        {{"path", path_}, {"error", errno_text("leave", error)}});
  }
}

}  // namespace libddp
