#include "libddp/memory/child_mappings.h"

#include <pthread.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace libddp {
namespace {

// An entry is whole when its address is a real one: fork() may come in the middle of a change.
constexpr std::uintptr_t kFree = 0;
constexpr std::uintptr_t kClaimed = 1;

struct Mapping {
  std::atomic<std::uintptr_t> data{kFree};
  std::size_t size_bytes = 0;
  int fd = -1;
};

std::array<Mapping, 4096> mappings;

// In the child, where only what is safe in a signal handler may be called.
void make_private() {
  for (Mapping& mapping : mappings) {
    const std::uintptr_t address = mapping.data.load(std::memory_order_acquire);
    if (address == kFree || address == kClaimed) continue;
    mapping.data.store(kFree, std::memory_order_relaxed);  // a child of the child keeps its writes
    void* data = reinterpret_cast<void*>(address);
    constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
    if (::mmap(data, mapping.size_bytes, PROT_READ | PROT_WRITE, kFlags, mapping.fd, 0) == data) {
      ::madvise(data, mapping.size_bytes, MADV_DONTDUMP);
    } else {
      ::mprotect(data, mapping.size_bytes, PROT_READ);
    }
  }
}

}  // namespace

void make_private_in_children(const SharedSegment& segment) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, make_private);
  static_cast<void>(registered);
  for (Mapping& mapping : mappings) {
    std::uintptr_t found = kFree;
    if (!mapping.data.compare_exchange_strong(found, kClaimed, std::memory_order_acquire)) continue;
    mapping.size_bytes = segment.size_bytes();
    mapping.fd = segment.fd();
    mapping.data.store(reinterpret_cast<std::uintptr_t>(segment.data()), std::memory_order_release);
    return;
  }
}

void forget_mapping(const std::byte* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  for (Mapping& mapping : mappings) {
    if (mapping.data.load(std::memory_order_relaxed) != address) continue;
    mapping.data.store(kFree, std::memory_order_release);
    return;
  }
}

}  // namespace libddp
