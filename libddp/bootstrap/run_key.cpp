#include "libddp/bootstrap/run_key.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"

namespace libddp {
namespace {

// One page, and one byte more than a key may have: a longer one shows.
constexpr std::size_t kKeyPage = 4096;
static_assert(RunKey::kMaxBytes < kKeyPage);

// For the end of a pipe; its bytes are there when a process starts.
constexpr std::chrono::seconds kPipeTimeout{5};

constexpr const char* kFileVariable = "LIBDDP_RUN_KEY_FILE";
constexpr const char* kDescriptorVariable = "LIBDDP_RUN_KEY_FD";
// What /proc calls the memory file of python/libddp/_run_key.py.
constexpr char kMemoryName[] = "/memfd:libddp-run-key (deleted)";

[[noreturn]] void refuse_key(const std::string& source, const std::string& problem,
                             const char* hint) {
  throw ArgumentError(fmt::format("libddp: run key from {}: {}. Hint: {}.", source, problem, hint));
}

/// True as soon as a read will not wait, also because it fails.
bool wait_readable(int descriptor, Deadline deadline) {
  pollfd entry{descriptor, POLLIN, 0};
  while (true) {
    const auto left = deadline.remaining(kPipeTimeout);
    const int milliseconds =
        static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
    const int ready = ::poll(&entry, 1, milliseconds);
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (deadline.expired()) return false;
  }
}

/// As a user makes one, or as a container gets it: of root, with the group that the run is in.
bool is_private(const struct stat& facts) {
  const mode_t open_to_others = facts.st_mode & 077;
  if (facts.st_uid == ::geteuid() && open_to_others == 0) return true;
  return facts.st_uid == 0 && (open_to_others & ~static_cast<mode_t>(040)) == 0;
}

void check_owner(int descriptor, const std::string& source) {
  struct stat facts {};
  if (::fstat(descriptor, &facts) != 0) {
    refuse_key(source, errno_text("fstat", errno), "give a file that this user can read");
  }
  if (!S_ISREG(facts.st_mode)) refuse_key(source, "it is no file", "give a plain file");
  if (facts.st_uid != ::geteuid() && facts.st_uid != 0) {
    refuse_key(
        source,
        fmt::format("it belongs to user {}, this process to user {}", facts.st_uid, ::geteuid()),
        "make a copy that belongs to the user of the run, or to root with mode 0640");
  }
  if (is_private(facts)) return;
  refuse_key(source, fmt::format("its mode is {:04o}, so others can use it", facts.st_mode & 07777),
             facts.st_uid == ::geteuid() && facts.st_uid != 0
                 ? "chmod 600, and make a new key if others may have read it"
                 : "root's file may be read by its group, and used by nobody else: mode 0640 or "
                   "less (Kubernetes: defaultMode 0440 and an fsGroup); make a new key if others "
                   "may have read it");
}

/// The number of the descriptor in "/proc/<process>/fd/<number>" of another process; else -1.
int descriptor_in(const std::string& path) {
  int process = -1;
  int number = -1;
  int end = 0;
  const int read = std::sscanf(path.c_str(), "/proc/%d/fd/%d%n", &process, &number, &end);
  const bool is_whole = read == 2 && end == static_cast<int>(path.size());
  return is_whole && process != ::getpid() ? number : -1;
}

/// Whether `descriptor` is the key that `libddp run` has made and passed on: a memory file by its
/// name, of this user, which nobody can change any more.
bool is_passed_on(int descriptor) {
  constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return false;
  char name[sizeof(kMemoryName)] = {};
  const std::string link = fmt::format("/proc/self/fd/{}", descriptor);
  const ssize_t size = ::readlink(link.c_str(), name, sizeof(name) - 1);
  struct stat facts {};
  return size > 0 && std::string_view(name) == kMemoryName && ::fstat(descriptor, &facts) == 0 &&
         is_private(facts);
}

}  // namespace

RunKey::RunKey() {
  void* page =
      ::mmap(nullptr, kKeyPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    throw Error(fmt::format("libddp: no page for the run key: {}.", errno_text("mmap", errno)));
  }
  ::madvise(page, kKeyPage, MADV_DONTDUMP);
  ::mlock(page, kKeyPage);  // not to the swap, where the limit allows it
  bytes_ = static_cast<unsigned char*>(page);
}

RunKey::~RunKey() {
  ::explicit_bzero(bytes_, kKeyPage);
  ::munmap(bytes_, kKeyPage);
}

void RunKey::check_size(const std::string& source) const {
  if (size_ >= kMinBytes && size_ <= kMaxBytes) return;
  refuse_key(source,
             fmt::format("it has {} bytes, a key has {} to {}",
                         size_ > kMaxBytes ? "more" : std::to_string(size_), kMinBytes, kMaxBytes),
             "make one with 'openssl rand -hex 32'");
}

void RunKey::read_all(int descriptor, const std::string& source) {
  const bool is_file = ::lseek(descriptor, 0, SEEK_CUR) >= 0;
  const Deadline deadline = Deadline::after(kPipeTimeout);
  while (size_ <= kMaxBytes) {
    if (!is_file && !wait_readable(descriptor, deadline)) {
      refuse_key(source, "its other end is neither closed nor written to",
                 "whoever writes the key must close the pipe after it");
    }
    const std::size_t room = kMaxBytes + 1 - size_;
    const ssize_t got = is_file
                            ? ::pread(descriptor, bytes_ + size_, room, static_cast<off_t>(size_))
                            : ::read(descriptor, bytes_ + size_, room);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse_key(source, errno_text("read", errno), "it must be open for reading");
    if (got == 0) break;
    size_ += static_cast<std::size_t>(got);
  }
  while (size_ > 0 && (bytes_[size_ - 1] == '\n' || bytes_[size_ - 1] == '\r')) --size_;
  check_size(source);
  require_crypto();
}

std::shared_ptr<const RunKey> RunKey::from_bytes(std::string_view bytes) {
  std::shared_ptr<RunKey> key(new RunKey());
  key->size_ = bytes.size();
  key->check_size("memory");
  std::memcpy(key->bytes_, bytes.data(), bytes.size());
  require_crypto();
  return key;
}

std::shared_ptr<const RunKey> RunKey::from_file(const std::string& path) {
  const std::string source = fmt::format("file {}", path);
  // The launcher's descriptor came with us under the same number. Its path may mean nothing here,
  // or another process: a container can have process ids of its own.
  if (const int inherited = descriptor_in(path); inherited >= 0 && is_passed_on(inherited)) {
    auto key = from_descriptor(inherited);
    ::close(inherited);
    return key;
  }
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file) {
    refuse_key(source, errno_text("open", errno),
               descriptor_in(path) < 0
                   ? "the file must be on this host, of this user, with mode 0600"
                   : "the process that holds the key has ended, or is not seen from here; name a "
                     "file that this process can read");
  }
  check_owner(file.get(), source);
  std::shared_ptr<RunKey> key(new RunKey());
  key->read_all(file.get(), source);
  return key;
}

std::shared_ptr<const RunKey> RunKey::from_descriptor(int descriptor) {
  const std::string source = fmt::format("descriptor {}", descriptor);
  if (::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) {
    refuse_key(source, errno_text("fcntl", errno),
               "whoever starts this process must pass the descriptor on (pass_fds), or use "
               "LIBDDP_RUN_KEY_FILE");
  }
  std::shared_ptr<RunKey> key(new RunKey());
  key->read_all(descriptor, source);
  return key;
}

Digest RunKey::tag(std::initializer_list<std::string_view> parts) const {
  std::string message;
  for (const std::string_view part : parts) {
    const std::uint64_t size = part.size();
    message.append(reinterpret_cast<const char*>(&size), sizeof(size));
    message.append(part);
  }
  return hmac_sha256(bytes_, size_, message);
}

std::shared_ptr<const RunKey> RunKey::derive(std::initializer_list<std::string_view> parts) const {
  std::shared_ptr<RunKey> key(new RunKey());
  Digest digest = tag(parts);
  std::memcpy(key->bytes_, digest.data(), digest.size());
  key->size_ = digest.size();
  ::explicit_bzero(digest.data(), digest.size());
  return key;
}

std::shared_ptr<const RunKey> given_run_key() {
  // A pipe can be read once only, and a file may be gone by the time of the second group.
  static std::mutex mutex;
  static std::pair<std::string, std::shared_ptr<const RunKey>> known;
  const std::optional<std::string> path = env_text(kFileVariable);
  const std::optional<long> descriptor = env_integer(kDescriptorVariable, 0, INT_MAX);
  if (path && descriptor) {
    throw ArgumentError(fmt::format("libddp: both {} and {} are set. Hint: give the run key once.",
                                    kFileVariable, kDescriptorVariable));
  }
  if (!path && !descriptor) return nullptr;
  const std::string source = path ? "file " + *path : fmt::format("descriptor {}", *descriptor);
  const std::lock_guard lock(mutex);
  if (known.first != source) {
    known.second =
        path ? RunKey::from_file(*path) : RunKey::from_descriptor(static_cast<int>(*descriptor));
    known.first = source;
  }
  return known.second;
}

bool is_run_key_required() { return env_flag("LIBDDP_REQUIRE_KEY", false); }

}  // namespace libddp
