#include "libddp/memory/private_view.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"
#include "libddp/memory/shared_segment.h"

namespace libddp {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
/// A fault for each page costs several times as much as copying it. So copies that come again at
/// once are kept, and given back now and then, in case that they would not come again.
constexpr int kGivenBack = 2, kCycle = 64;

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

/// Address space for `size` bytes that stands on huge pages as `offset` does in its file, so that
/// the kernel can map 2 MiB at once. MAP_FAILED where there is none.
void* reserve_like(std::uint64_t offset, std::size_t size) {
  void* const all = ::mmap(nullptr, size + kHugePage, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return all;
  const auto start = reinterpret_cast<std::uintptr_t>(all);
  const std::size_t head = (offset % kHugePage + kHugePage - start % kHugePage) % kHugePage;
  auto* const bytes = static_cast<std::byte*>(all);
  if (head > 0) ::munmap(bytes, head);
  ::munmap(bytes + head + size, kHugePage - head);
  return bytes + head;
}

/// proc(5): in memory or in swap, and not the page of a file.
bool is_copy(std::uint64_t entry) {
  constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
  constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
  constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;
  return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0;
}

}  // namespace

std::shared_ptr<PrivateView> PrivateView::of(std::byte* shared, std::size_t size_bytes) {
  const auto place = SharedSegment::find(shared, size_bytes);
  LIBDDP_CHECK(place.has_value(), "a private view of memory that is not shared");
  return std::shared_ptr<PrivateView>(
      new PrivateView(shared, size_bytes, place->fd, place->offset));
}

PrivateView::PrivateView(std::byte* shared, std::size_t size_bytes, int fd, std::uint64_t offset)
    : shared_(shared), size_bytes_(size_bytes), head_bytes_(offset % page_size()) {
  const std::uint64_t first = offset - head_bytes_;
  const std::size_t size = num_pages() * page_size();
  void* data = reserve_like(first, size);
  if (data != MAP_FAILED) {
    void* const place = data;
    data = ::mmap(place, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd,
                  static_cast<off_t>(first));
    if (data == MAP_FAILED) ::munmap(place, size);
  }
  if (data == MAP_FAILED) {
    throw Error(fmt::format(
        "libddp: cannot map {} bytes of shared memory a second time: {}. Hint: raise the limit of "
        "address space (ulimit -v).",
        size, errno_text("mmap", errno)));
  }
  pages_ = static_cast<std::byte*>(data);
  ::madvise(pages_, size, MADV_DONTDUMP);  // a wish, as for the segment
}

PrivateView::~PrivateView() {
  if (pages_ != nullptr) ::munmap(pages_, num_pages() * page_size());
}

std::size_t PrivateView::num_pages() const {
  return (head_bytes_ + size_bytes_ + page_size() - 1) / page_size();
}

std::vector<PrivateView::Range> PrivateView::written_pages() const {
  const UniqueFd map(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  const std::size_t first = reinterpret_cast<std::uintptr_t>(pages_) / page_size();
  std::array<std::uint64_t, 8192> entries;
  std::vector<Range> ranges;
  for (std::size_t page = 0; page < num_pages();) {
    const std::size_t count = std::min(entries.size(), num_pages() - page);
    const ssize_t got = ::pread(map.get(), entries.data(), count * sizeof(entries[0]),
                                static_cast<off_t>((first + page) * sizeof(entries[0])));
    if (got < 0 && errno == EINTR) continue;
    const std::size_t known = got < 0 ? 0 : static_cast<std::size_t>(got) / sizeof(entries[0]);
    if (known == 0) return {{0, num_pages()}};
    for (std::size_t i = 0; i < known; ++i, ++page) {
      if (!is_copy(entries[i])) continue;
      if (ranges.empty() || ranges.back().second != page) ranges.push_back({page, page});
      ++ranges.back().second;
    }
  }
  return ranges;
}

std::vector<PrivateView::Range> PrivateView::written() const {
  std::vector<Range> ranges = written_pages();
  for (auto& [begin, end] : ranges) {
    begin = std::max(begin * page_size(), head_bytes_) - head_bytes_;
    end = std::min(end * page_size() - head_bytes_, size_bytes_);
  }
  return ranges;
}

void PrivateView::drop() {
  const std::vector<Range> written = written_pages();
  num_drops_ = written.empty() ? 0 : (num_drops_ + 1) % kCycle;
  const bool gives_back = num_drops_ <= kGivenBack;
  for (const auto& [begin, end] : written) {
    std::byte* const pages = pages_ + begin * page_size();
    // Pages that are locked in memory stay, too.
    if (gives_back && ::madvise(pages, (end - begin) * page_size(), MADV_DONTNEED) == 0) continue;
    const std::size_t from = std::max(begin * page_size(), head_bytes_) - head_bytes_;
    const std::size_t to = std::min(end * page_size() - head_bytes_, size_bytes_);
    std::memcpy(data() + from, shared_ + from, to - from);
  }
}

}  // namespace libddp
