#include "libddp/slots/fresh_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/base/printable.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

/// Less is not worth a thread's waking up.
constexpr std::size_t kDirectBytes = 64u << 10;
/// So much of the page cache waits for the disk.
constexpr std::uint64_t kCachedBytes = 32u << 20;

/// What may still be put on a file's disk; none where the file system does not say.
std::optional<std::uint64_t> free_bytes(int fd) {
  struct statvfs disk {};
  if (::fstatvfs(fd, &disk) != 0 || disk.f_blocks == 0) return std::nullopt;
  const auto blocks = ::geteuid() == 0 ? disk.f_bfree : disk.f_bavail;  // some are kept for root
  return static_cast<std::uint64_t>(blocks) * disk.f_frsize;
}

}  // namespace

FreshFile::FreshFile(const std::string& path)
    : path_(path),
      fresh_(path + ".part"),
      fd_(::open(fresh_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (!fd_) refuse("open", errno);
  direct_.emplace(fresh_, fd_.get());
}

FreshFile::~FreshFile() {
  if (fd_) ::unlink(fresh_.c_str());
}

void FreshFile::reserve(std::uint64_t bytes) {
  wanted_bytes_ = bytes;
  if (bytes == 0) return;
  // fallocate takes all that is left before it finds that it is too little (ext4), and until it has
  // given that back the disk is full for everybody else on it, too.
  const std::optional<std::uint64_t> room = free_bytes(fd_.get());
  if (room && *room < bytes) refuse("fallocate", ENOSPC);
  while (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return;
    if (errno != EINTR) refuse("fallocate", errno);
  }
}

void FreshFile::append(std::span<const std::byte> bytes, bool stays) {
  constexpr std::size_t kBlock = DirectWriter::kBlockBytes;
  const std::size_t whole = bytes.size() / kBlock * kBlock;
  if (direct_->is_usable() && written_ % kBlock == 0 && whole >= kDirectBytes) {
    direct_->write(bytes.first(whole), written_, stays);
    written_ += whole;
    bytes = bytes.subspan(whole);
  }
  if (direct_->error() != 0) refuse("write", direct_->error());
  append_to_cache(bytes);
}

void FreshFile::append_to_cache(std::span<const std::byte> bytes) {
  const std::uint64_t begin = written_;
  while (!bytes.empty()) {
    const ssize_t count =
        ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(written_));
    if (count < 0 && errno != EINTR) refuse("write", errno);
    if (count <= 0) continue;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    written_ += static_cast<std::uint64_t>(count);
  }
  if (written_ > begin) hand_over(begin, written_);
}

/// The disk begins with these bytes, and is waited for with some of before, which then leave the
/// page cache. All of it is advice: what the system will not do, fsync does.
void FreshFile::hand_over(std::uint64_t begin, std::uint64_t end) {
  const auto offset = [](std::uint64_t bytes) { return static_cast<off64_t>(bytes); };
  ::sync_file_range(fd_.get(), offset(begin), offset(end - begin), SYNC_FILE_RANGE_WRITE);
  if (end < handed_over_ + 2 * kCachedBytes) return;
  ::sync_file_range(
      fd_.get(), offset(handed_over_), offset(kCachedBytes),
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  ::posix_fadvise(fd_.get(), offset(handed_over_), offset(kCachedBytes), POSIX_FADV_DONTNEED);
  handed_over_ += kCachedBytes;
}

void FreshFile::put_in_place() {
  if (const int error = direct_->finish()) refuse("write", error);
  if (::fsync(fd_.get()) != 0) refuse("fsync", errno);
  ::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED);
  if (::rename(fresh_.c_str(), path_.c_str()) != 0) refuse("rename", errno);
  fd_.reset();
  sync_folder(folder_of(path_));
}

void FreshFile::refuse(const char* call, int error) {
  std::string why = errno_text(call, error);
  if (error == ENOSPC || error == EDQUOT) {
    if (const std::optional<std::uint64_t> room = free_bytes(fd_.get())) {
      why += fmt::format("; {} bytes are needed, {} are free", wanted_bytes_, *room);
    }
    refuse_file(path_, why, "make room, or name a folder on another disk");
  }
  refuse_file(path_, why, "name a folder in which this user may write");
}

void refuse_file(const std::string& path, const std::string& why, const char* hint) {
  throw SnapshotError(
      fmt::format("libddp snapshot: {}: {}. Hint: {}.", printable(path), why, hint));
}

void sync_folder(const std::string& path) {
  const UniqueFd folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder && ::fsync(folder.get()) == 0) return;
  if (folder && (errno == EINVAL || errno == ENOTSUP)) return;  // nothing to synchronise there
  refuse_file(path, errno_text(folder ? "fsync" : "open", errno),
              "look at the folder and its disk");
}

}  // namespace libddp
