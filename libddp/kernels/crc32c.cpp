#include "libddp/kernels/crc32c.h"

#include <array>

#include "libddp/base/check.h"
#include "libddp/kernels/crc32c_polynomial.h"
#include "libddp/kernels/crc32c_steps.h"

namespace libddp {
namespace {

bool cpu_has_sse42() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#else
  return false;
#endif
}

bool cpu_has_vpclmul() {
#if defined(__x86_64__)
  return cpu_has_sse42() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq");
#else
  return false;
#endif
}

struct CrcPaths {
  CrcPaths() {
    add(Crc32cPath::Scalar, scalar_crc32c(), true);
    add(Crc32cPath::Sse42, sse42_crc32c(), cpu_has_sse42());
    add(Crc32cPath::Vpclmul, vpclmul_crc32c(), cpu_has_vpclmul());
  }

  void add(Crc32cPath path, const Crc32cTable& table, bool usable) {
    if (!usable || !table.sum) return;
    tables[static_cast<std::size_t>(path)] = table;
    available.push_back(path);
  }

  std::array<Crc32cTable, 3> tables;
  std::vector<Crc32cPath> available;
};

const CrcPaths& crc_paths() {
  static const CrcPaths instance;
  return instance;
}

const Crc32cTable& crc_table_of(Crc32cPath path) {
  const Crc32cTable& table = crc_paths().tables[static_cast<std::size_t>(path)];
  LIBDDP_CHECK(table.sum != nullptr, "this CPU or build lacks the path");
  return table;
}

const Crc32cTable& best_crc_table() {
  static const Crc32cTable& table = crc_table_of(crc_paths().available.back());
  return table;
}

Crc32cKernel copy_kernel(const Crc32cTable& table, Crc32cStores stores, std::size_t size) {
  const bool streams = stores == Crc32cStores::Streamed ||
                       (stores == Crc32cStores::Chosen && size >= kCrc32cStreamBytes);
  return streams ? table.stream : table.copy;
}

std::uint32_t sum_with(const Crc32cTable& table, const void* bytes, std::size_t size,
                       std::uint32_t before) {
  return ~table.sum({.from = static_cast<const std::byte*>(bytes), .size = size}, ~before);
}

std::uint32_t copy_with(const Crc32cTable& table, Crc32cStores stores, void* to, const void* from,
                        std::size_t size, std::uint32_t before) {
  const Crc32cRange range{static_cast<std::byte*>(to), static_cast<const std::byte*>(from), size};
  return ~copy_kernel(table, stores, size)(range, ~before);
}

}  // namespace

std::uint32_t crc32c(const void* bytes, std::size_t size, std::uint32_t before) {
  return sum_with(best_crc_table(), bytes, size, before);
}

std::uint32_t copy_with_crc32c(void* to, const void* from, std::size_t size, std::uint32_t before) {
  return copy_with(best_crc_table(), Crc32cStores::Chosen, to, from, size, before);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::size_t second_size) {
  // The inversions of both cancel each other out.
  const std::uint64_t bits = 8 * static_cast<std::uint64_t>(second_size);
  return crc32c_polynomial::multiply(first, crc32c_polynomial::power_of_x(bits)) ^ second;
}

std::string_view name(Crc32cPath path) {
  switch (path) {
    case Crc32cPath::Scalar:
      return "scalar";
    case Crc32cPath::Sse42:
      return "sse42";
    case Crc32cPath::Vpclmul:
      return "vpclmul";
  }
  return "unknown";
}

const std::vector<Crc32cPath>& crc32c_paths() { return crc_paths().available; }

std::uint32_t crc32c_on(Crc32cPath path, const void* bytes, std::size_t size,
                        std::uint32_t before) {
  return sum_with(crc_table_of(path), bytes, size, before);
}

std::uint32_t copy_with_crc32c_on(Crc32cPath path, Crc32cStores stores, void* to, const void* from,
                                  std::size_t size, std::uint32_t before) {
  return copy_with(crc_table_of(path), stores, to, from, size, before);
}

}  // namespace libddp
