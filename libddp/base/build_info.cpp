#include "libddp/base/build_info.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "libddp/base/env.h"
#include "libddp/base/error.h"

namespace libddp {
namespace {

SimdLevel cpu_simd_level() {
#if defined(__x86_64__)
  // The compiler's run-time library also asks the kernel whether it saves the wide registers.
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if !defined(__clang__) || __clang_major__ >= 17
  // Older clangs cannot ask for it; every CPU with AVX2 has it.
  avx2 = avx2 && __builtin_cpu_supports("f16c");
#endif
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) return SimdLevel::Avx512;
  if (avx2) return SimdLevel::Avx2;
#endif
  return SimdLevel::Scalar;
}

SimdLevel choose_simd_level() {
  const SimdLevel best = cpu_simd_level();
  const auto wish = env_choice("LIBDDP_SIMD", {"scalar", "avx2", "avx512"});
  if (!wish) return best;
  for (SimdLevel level : compiled_simd_levels()) {
    if (name(level) == *wish && level <= best) return level;
  }
  throw ArgumentError(fmt::format(
      "libddp: environment variable LIBDDP_SIMD='{}' asks for more than this CPU and build offer "
      "('{}'). Hint: lower or unset LIBDDP_SIMD.",
      *wish, name(best)));
}

}  // namespace

std::string_view name(SimdLevel level) {
  constexpr std::string_view kNames[] = {"scalar", "avx2", "avx512"};
  return kNames[static_cast<int>(level)];
}

std::string_view version() { return LIBDDP_VERSION; }

std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

std::vector<SimdLevel> compiled_simd_levels() {
#if defined(__x86_64__)
  return {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512};
#else
  return {SimdLevel::Scalar};
#endif
}

SimdLevel simd_level() {
  static const SimdLevel level = choose_simd_level();
  return level;
}

std::string build_summary() {
  std::vector<std::string_view> names;
  for (SimdLevel level : compiled_simd_levels()) names.push_back(name(level));
  return fmt::format("libddp {}, {}, simd {} (compiled: {})", version(), compiler(),
                     name(simd_level()), fmt::join(names, " "));
}

}  // namespace libddp
