#include "libddp/kernels/copy_bytes.h"

#include <cstdint>
#include <cstring>

#include "libddp/base/cache_line.h"
#include "libddp/kernels/reduce_table.h"

namespace libddp {
namespace {

// Below, the call of memcpy costs less than ours saves.
constexpr std::size_t kSmallBytes = 256;

void copy_streaming(const KernelTable& kernels, std::byte* to, const std::byte* from,
                    std::size_t bytes) {
  const std::size_t head =
      (kCacheLineBytes - reinterpret_cast<std::uintptr_t>(to) % kCacheLineBytes) % kCacheLineBytes;
  const std::size_t body = (bytes - head) / kCacheLineBytes * kCacheLineBytes;
  std::memcpy(to, from, head);
  kernels.stream(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  copy_part(to, from, bytes, bytes);
}

void copy_part(void* to, const void* from, std::size_t bytes, std::size_t whole_bytes) {
  if (bytes == 0 || to == from) return;
  if (bytes < kSmallBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  const KernelTable& kernels = best_kernels();
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  if (whole_bytes >= kStreamBytes && kernels.stream) {
    return copy_streaming(kernels, target, source, bytes);
  }
  kernels.copy(target, source, bytes);
}

}  // namespace libddp
