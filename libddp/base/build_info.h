#pragma once

// What this build is and which vector path it takes on this CPU.
// Thread rule: any thread; constants of the process.
//
//   if (simd_level() >= SimdLevel::Avx2) table = avx2_kernels();
//   std::string line = build_summary();   // "libddp 0.1.0, gcc 12.2.0, simd avx512 (avx512 ...)"

#include <string>
#include <string_view>
#include <vector>

namespace libddp {

/// Ordered: a CPU that can do one can do all before it.
enum class SimdLevel { Scalar, Avx2, Avx512 };

std::string_view name(SimdLevel level);

/// "0.1.0".
std::string_view version();

/// "gcc 12.2.0", "clang 17.0.6".
std::string compiler();

/// Paths that this build has, slowest first. "avx2" stands for AVX2 + FMA + F16C, "avx512" for the
/// F, BW, VL and DQ parts on top.
std::vector<SimdLevel> compiled_simd_levels();

/// The best compiled path that this CPU and kernel support; LIBDDP_SIMD=scalar|avx2|avx512 lowers
/// it. ArgumentError where LIBDDP_SIMD asks for what the CPU cannot do.
SimdLevel simd_level();

/// One line for reports.
std::string build_summary();

}  // namespace libddp
