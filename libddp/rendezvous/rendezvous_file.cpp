#include "libddp/rendezvous/rendezvous_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "libddp/base/deadline.h"
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

/// A rank holds the lock for a few system calls; a stopped one must not stop the others for good.
constexpr std::chrono::seconds kLockTimeout{5};
constexpr std::chrono::milliseconds kLockPeriod{10};

/// What keeps `count` from being our count of `file`, or nullptr. Whoever can write in the folder
/// can put something there first: a link to a file of this user's, a pipe, a file of their own.
const char* objection(const struct stat& count, const struct stat& file) {
  if (!S_ISREG(count.st_mode)) return "it is no plain file";
  // Where a shared folder has an owner of its own for root's files, it owns both.
  if (count.st_uid != ::geteuid() && count.st_uid != file.st_uid) return "it is another user's";
  if (count.st_nlink > 1) return "it has another name too";
  if (count.st_size != 0 && count.st_size != sizeof(Record)) return "it is no count of ranks";
  return nullptr;
}

/// False if somebody else held the lock all the time.
bool lock_in_time(int descriptor, Deadline deadline) {
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if ((errno != EWOULDBLOCK && errno != EINTR) || deadline.expired()) return false;
    std::this_thread::sleep_for(kLockPeriod);
  }
  return true;
}

/// Counts this rank under the file's lock; returns what kept it from that, empty if nothing did.
std::string leave(const std::string& path, const std::string& count_path, int world_size) {
  const UniqueFd count(::open(
      count_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0600));
  if (!count) return errno_text("open", errno);
  struct stat file {};
  struct stat facts {};
  if (::stat(path.c_str(), &file) != 0) return errno_text("stat", errno);
  if (::fstat(count.get(), &facts) != 0) return errno_text("fstat", errno);
  if (const char* reason = objection(facts, file)) return reason;
  if (!lock_in_time(count.get(), Deadline::after(kLockTimeout))) {
    return "another process holds its lock";
  }
  Record record;
  if (::pread(count.get(), &record, sizeof(record), 0) != sizeof(record) ||
      record.inode != file.st_ino) {
    record = {file.st_ino, 0};
  }
  ++record.num_left;
  if (record.num_left >= world_size) {
    ::unlink(path.c_str());
    ::unlink(count_path.c_str());
    return {};
  }
  if (::pwrite(count.get(), &record, sizeof(record), 0) == sizeof(record)) return {};
  return errno_text("write", errno);
}

}  // namespace

LeavingCount::~LeavingCount() {
  const std::string count_path = path_ + ".left";
  const std::string problem = leave(path_, count_path, world_size_);
  if (!problem.empty()) {
    log(LogLevel::Warn, "rendezvous_file_left_behind",
        {{"path", path_}, {"count", count_path}, {"error", problem}});
  }
}

}  // namespace libddp
