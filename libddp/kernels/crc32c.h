#pragma once

// CRC-32C (Castagnoli, as in RFC 3720, SSE4.2 and leveldb without its mask), alone or while
// copying.
//
// copy_with_crc32c reads each byte of the source once, into a register, and both stores and sums up
// that register. So the checksum is that of the copy, whatever another thread, process or device
// does to the source meanwhile. Copies are meant to be kept, not to be read at once: but for short
// ones they go past the caches. Thread rule: free functions without state; any thread.
//
//   std::uint32_t sum = copy_with_crc32c(file, tensor, bytes);
//   sum = copy_with_crc32c(file + bytes, next, more_bytes, sum);   // of both, one after the other

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace libddp {

/// The checksum of `size` bytes that follow others with the checksum `before`:
/// crc32c(b, crc32c(a)) is that of a and then b. No bytes need no memory and leave `before`.
std::uint32_t crc32c(const void* bytes, std::size_t size, std::uint32_t before = 0);

/// Copies `size` bytes and returns their checksum, as crc32c does. REQUIRES no overlap; any
/// alignment. ENSURES that the copy is seen by whoever acquires what this thread releases next.
std::uint32_t copy_with_crc32c(void* to, const void* from, std::size_t size,
                               std::uint32_t before = 0);

/// The checksum of bytes with the checksum `first` followed by `second_size` bytes with the
/// checksum `second`. For parts that several threads have summed up; takes about a microsecond.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::size_t second_size);

/// Instruction sets for which there is code of its own.
enum class Crc32cPath { Scalar, Sse42, Vpclmul };

std::string_view name(Crc32cPath path);

/// The paths that this CPU can run, the best one last.
const std::vector<Crc32cPath>& crc32c_paths();

/// From this size on a copy goes past the caches. Far less than copy_bytes has: a snapshot of many
/// tensors is larger than any cache, however small each of them is.
inline constexpr std::size_t kCrc32cStreamBytes = 16u << 10;

/// How a copy stores; Chosen goes past the caches from kCrc32cStreamBytes on.
enum class Crc32cStores { Chosen, Cached, Streamed };

/// The same on a path of crc32c_paths(), for tests and benchmarks.
std::uint32_t crc32c_on(Crc32cPath path, const void* bytes, std::size_t size,
                        std::uint32_t before = 0);
std::uint32_t copy_with_crc32c_on(Crc32cPath path, Crc32cStores stores, void* to, const void* from,
                                  std::size_t size, std::uint32_t before = 0);

}  // namespace libddp
