#include "libddp/memory/shared_segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/memory/child_mappings.h"

namespace libddp {
namespace {

constexpr std::size_t kHugePageBytes = 2u << 20;
constexpr int kRequiredSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Linux 6.3; hosts with vm.memfd_noexec=2 refuse a memfd without it.
constexpr unsigned kNoExecSeal = 0x0008U;

UniqueFd make_memfd(const std::string& name) {
  // The kernel takes at most 249 characters.
  const std::string short_name = name.substr(0, 200);
  int fd = ::memfd_create(short_name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) {
    fd = ::memfd_create(short_name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  }
  if (fd < 0) {
    throw Error(fmt::format(
        "libddp: cannot create shared memory '{}': {}. Hint: raise the limit of open files "
        "(ulimit -n), or let the sandbox allow memfd_create.",
        name, errno_text("memfd_create", errno)));
  }
  return UniqueFd(fd);
}

// Address space of `size_bytes` that starts on a huge page, so that page offsets in file and memory
// agree and the kernel can map 2 MiB at once. Nothing is readable there yet. nullptr on failure.
std::byte* reserve_address_space(std::size_t size_bytes) {
  const std::size_t slack = size_bytes >= kHugePageBytes ? kHugePageBytes : 0;
  void* start = ::mmap(nullptr, size_bytes + slack, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  if (slack == 0) return static_cast<std::byte*>(start);
  auto* bytes = static_cast<std::byte*>(start);
  const std::size_t head =
      (kHugePageBytes - reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  if (head > 0) ::munmap(bytes, head);
  // The mapping may end inside a page; munmap wants the page after it.
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t used = (size_bytes + page - 1) / page * page;
  if (slack > head) ::munmap(bytes + head + used, slack - head);
  return bytes + head;
}

std::byte* map_shared(int fd, std::size_t size_bytes) {
  std::byte* place = reserve_address_space(size_bytes);
  void* data = MAP_FAILED;
  if (place != nullptr) {
    data = ::mmap(place, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                  fd, 0);
  }
  if (data == MAP_FAILED) {
    const int error = errno;
    if (place != nullptr) ::munmap(place, size_bytes);
    throw Error(fmt::format(
        "libddp: cannot map {} bytes of shared memory: {}. Hint: raise the limit of address space "
        "(ulimit -v).",
        size_bytes, errno_text("mmap", error)));
  }
  // Both are wishes: kernels without huge pages for shared memory, or without core dump control,
  // answer EINVAL and everything still works.
  if (size_bytes >= kHugePageBytes) ::madvise(data, size_bytes, MADV_HUGEPAGE);
  ::madvise(data, size_bytes, MADV_DONTDUMP);
  return static_cast<std::byte*>(data);
}

/// The segments that this process has mapped: beginning -> end and descriptor.
struct Mapped {
  struct Entry {
    const std::byte* end = nullptr;
    int fd = -1;
  };
  std::mutex mutex;
  std::map<const std::byte*, Entry> entries;
};

// Never destroyed: segments may be parts of objects of static storage.
Mapped& mapped() {
  static auto* const instance = new Mapped();
  return *instance;
}

}  // namespace

SharedSegment::SharedSegment(UniqueFd fd, std::byte* data, std::size_t size_bytes)
    : fd_(std::move(fd)), data_(data), size_bytes_(size_bytes) {
  const std::lock_guard lock(mapped().mutex);
  mapped().entries[data_] = {data_ + size_bytes_, fd_.get()};
}

std::optional<SharedSegment::Place> SharedSegment::find(const void* pointer,
                                                        std::size_t size_bytes) {
  const auto* const bytes = static_cast<const std::byte*>(pointer);
  const std::lock_guard lock(mapped().mutex);
  auto next = mapped().entries.upper_bound(bytes);
  if (next == mapped().entries.begin()) return std::nullopt;
  const auto& [begin, entry] = *--next;
  if (bytes + size_bytes > entry.end) return std::nullopt;
  return Place{entry.fd, static_cast<std::uint64_t>(bytes - begin)};
}

void SharedSegment::unmap() {
  if (data_ == nullptr) return;
  {
    const std::lock_guard lock(mapped().mutex);
    mapped().entries.erase(data_);
  }
  forget_mapping(data_);  // before the address can be another's
  ::munmap(data_, size_bytes_);
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  if (this != &other) {
    unmap();
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

SharedSegment::~SharedSegment() { unmap(); }

SharedSegment SharedSegment::create(const std::string& name, std::size_t size_bytes) {
  SharedSegment segment = reserve(name, size_bytes);
  segment.seal();
  return segment;
}

SharedSegment SharedSegment::reserve(const std::string& name, std::size_t size_bytes) {
  if (size_bytes == 0) {
    throw ArgumentError(fmt::format("libddp: shared memory '{}' of 0 bytes asked for.", name));
  }
  UniqueFd fd = make_memfd(name);
  if (::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    throw Error(fmt::format(
        "libddp: cannot reserve {} bytes of shared memory '{}': {}. Hint: raise the limit of file "
        "size (ulimit -f).",
        size_bytes, name, errno_text("ftruncate", errno)));
  }
  std::byte* data = map_shared(fd.get(), size_bytes);
  return SharedSegment(std::move(fd), data, size_bytes);
}

void SharedSegment::seal() {
  if (::fcntl(fd_.get(), F_ADD_SEALS, kRequiredSeals) != 0) {
    throw Error(fmt::format("libddp: cannot seal {} bytes of shared memory: {}.", size_bytes_,
                            errno_text("fcntl(F_ADD_SEALS)", errno)));
  }
}

void SharedSegment::seal_at(std::size_t size_bytes) {
  LIBDDP_CHECK(size_bytes > 0 && size_bytes <= size_bytes_, "more than was reserved");
  if (::ftruncate(fd_.get(), static_cast<off_t>(size_bytes)) != 0) {
    throw Error(fmt::format("libddp: cannot cut shared memory to {} bytes: {}.", size_bytes,
                            errno_text("ftruncate", errno)));
  }
  seal();
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t used = (size_bytes + page - 1) / page * page;
  if (used < size_bytes_) ::munmap(data_ + used, size_bytes_ - used);
  size_bytes_ = size_bytes;
  const std::lock_guard lock(mapped().mutex);
  mapped().entries[data_].end = data_ + size_bytes_;
}

bool SharedSegment::is_behind(int fd) const {
  struct stat own {};
  struct stat other {};
  return ::fstat(fd_.get(), &own) == 0 && ::fstat(fd, &other) == 0 && own.st_dev == other.st_dev &&
         own.st_ino == other.st_ino;
}

SharedSegment SharedSegment::map(UniqueFd fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kRequiredSeals) != kRequiredSeals) {
    const std::string found =
        seals < 0 ? errno_text("fcntl(F_GET_SEALS)", errno) : fmt::format("seals {:#x}", seals);
    throw NetworkError(
        fmt::format("libddp: a peer passed a descriptor that is not shared memory of fixed size "
                    "({}). Hint: all "
                    "ranks must run the same libddp version.",
                    found));
  }
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0 || status.st_size <= 0) {
    throw NetworkError(
        fmt::format("libddp: a peer passed shared memory of {} bytes.", status.st_size));
  }
  const auto size_bytes = static_cast<std::size_t>(status.st_size);
  std::byte* data = map_shared(fd.get(), size_bytes);
  return SharedSegment(std::move(fd), data, size_bytes);
}

}  // namespace libddp
