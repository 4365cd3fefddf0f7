#include "libddp/snapshot/ready_pages.h"

#include <sys/stat.h>

#include <utility>

namespace libddp {
namespace {

/// What the save turns out to have more: counters of optimizers, random numbers, values. Address
/// space only.
constexpr std::uint64_t kMore = 64u << 20;

}  // namespace

ReadyPages::ReadyPages(std::uint64_t size_bytes, const SlotMemory::Range& first)
    : segment_(SharedSegment::reserve("libddp-snapshot", size_bytes + size_bytes / 4 + kMore)),
      job_(prefault(segment_.data() + first.begin, first.bytes)) {}

ReadyPages::~ReadyPages() { job_->cancel(); }

std::uint64_t ReadyPages::bytes() const {
  struct stat status {};
  if (::fstat(segment_.fd(), &status) != 0) return 0;
  return static_cast<std::uint64_t>(status.st_blocks) * 512;  // whatever the block size is
}

SharedSegment ReadyPages::take() {
  job_->cancel();
  return std::move(segment_);
}

}  // namespace libddp
