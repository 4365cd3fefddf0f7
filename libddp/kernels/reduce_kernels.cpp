#include "libddp/kernels/reduce_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "libddp/base/cache_line.h"
#include "libddp/base/check.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_table.h"

namespace libddp {
namespace {

bool cpu_has_avx2() {
#if defined(__x86_64__)
  // clang 14 does not take "f16c" in __builtin_cpu_supports.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = ::__get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(__x86_64__)
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

struct Paths {
  Paths() {
    tables[0] = scalar_kernels();
    available.push_back(ReducePath::Scalar);
    add(ReducePath::Avx2, avx2_kernels(), cpu_has_avx2());
    add(ReducePath::Avx512, avx512_kernels(), cpu_has_avx512());
  }

  void add(ReducePath path, KernelTable table, bool usable) {
    if (!usable || !table.find) return;
    tables[static_cast<std::size_t>(path)] = table;
    available.push_back(path);
  }

  std::array<KernelTable, 3> tables;
  std::vector<ReducePath> available;
};

const Paths& paths() {
  static const Paths instance;
  return instance;
}

// Results that are read once more only after the caches have seen much else go past them. What is a
// source too lies in the cache already.
bool streams(const ReduceJob& job) {
  const std::size_t count = std::max(job.count, job.whole_count);
  if (count * element_bytes(job.dtype) < kStreamBytes || job.num_destinations != 1) return false;
  const auto* end = job.sources + job.num_sources;
  return std::find(job.sources, end, job.destinations[0]) == end &&
         reinterpret_cast<std::uintptr_t>(job.destinations[0]) % kCacheLineBytes == 0;
}

KernelJob prepare(const ReduceJob& job) {
  KernelJob kernel_job{.count = job.count,
                       .sources = job.sources,
                       .num_sources = job.num_sources,
                       .destinations = job.destinations,
                       .num_destinations = job.num_destinations,
                       .factor = job.scale,
                       .streams = streams(job)};
  if (job.op != ReduceOp::Avg) return kernel_job;
  // 1/p is exact for powers of two, and a multiplication is cheaper than a division.
  const int divisor = job.num_averaged > 0 ? job.num_averaged : job.num_sources;
  if (std::has_single_bit(static_cast<unsigned>(divisor))) {
    kernel_job.factor = job.scale / divisor;
  } else {
    kernel_job.divisor = divisor;
  }
  return kernel_job;
}

ReduceKernel kernel_of(const KernelTable& table, Dtype dtype, ReduceOp op) {
  return table.find(dtype, op == ReduceOp::Avg ? ReduceOp::Sum : op);
}

void run(const KernelTable& table, const ReduceJob& job) {
  const ReduceKernel kernel = kernel_of(table, job.dtype, job.op);
  LIBDDP_CHECK(kernel != nullptr, "operation and dtype were not checked");
  kernel(prepare(job));
}

}  // namespace

const KernelTable& best_kernels() {
  static const KernelTable& table =
      paths().tables[static_cast<std::size_t>(paths().available.back())];
  return table;
}

std::string_view name(ReducePath path) {
  switch (path) {
    case ReducePath::Scalar:
      return "scalar";
    case ReducePath::Avx2:
      return "avx2";
    case ReducePath::Avx512:
      return "avx512";
  }
  return "unknown";
}

bool scalable(Dtype dtype) {
  return dtype == Dtype::Float32 || dtype == Dtype::Float64 || dtype == Dtype::BFloat16 ||
         dtype == Dtype::Float16;
}

bool reducible(Dtype dtype, ReduceOp op) {
  if (is_float8(dtype)) return false;
  const bool floating = scalable(dtype);
  switch (op) {
    case ReduceOp::Avg:
      return floating;
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      return !floating;
    default:
      return true;
  }
}

const std::vector<ReducePath>& reduce_paths() { return paths().available; }

void reduce(const ReduceJob& job) { run(best_kernels(), job); }

void reduce_on(ReducePath path, const ReduceJob& job) {
  const KernelTable& table = paths().tables[static_cast<std::size_t>(path)];
  LIBDDP_CHECK(table.find != nullptr, "this CPU or build lacks the path");
  run(table, job);
}

}  // namespace libddp
