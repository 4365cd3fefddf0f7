#include "libddp/base/parent_only.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace libddp {
namespace {

constexpr int kMaxDescriptors = 65536;
constexpr int kWordBits = 64;

// One bit per descriptor: a table that fork() finds whole, whatever other threads did to it.
std::array<std::atomic<std::uint64_t>, kMaxDescriptors / kWordBits> marked{};

std::uint64_t bit_of(int fd) { return std::uint64_t{1} << (fd % kWordBits); }

// In the child, where only what is safe in a signal handler may be called.
void close_marked() {
  const int nothing = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (int word = 0; word < kMaxDescriptors / kWordBits; ++word) {
    std::uint64_t bits = marked[word].load(std::memory_order_relaxed);
    if (bits == 0) continue;
    marked[word].store(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) {
      const int fd = word * kWordBits + std::countr_zero(bits);
      if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
    }
  }
  if (nothing >= 0) ::close(nothing);
}

}  // namespace

void close_in_children(int fd) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, close_marked);
  static_cast<void>(registered);
  if (fd < 0 || fd >= kMaxDescriptors) return;
  marked[fd / kWordBits].fetch_or(bit_of(fd), std::memory_order_relaxed);
}

void keep_in_children(int fd) {
  if (fd < 0 || fd >= kMaxDescriptors) return;
  marked[fd / kWordBits].fetch_and(~bit_of(fd), std::memory_order_relaxed);
}

}  // namespace libddp
