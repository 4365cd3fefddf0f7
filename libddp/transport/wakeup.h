#pragma once

// Sleeping and waking across processes on a 32-bit word in shared memory (futex, not PRIVATE).
// Thread rule: free functions on atomics; any thread, any process that maps the word.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace libddp {

/// Sleeps while `word` holds `expected`, at most `limit`. Returns early on wakes and signals;
/// callers re-check.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds limit);

/// Wakes every sleeper on `word`.
void futex_wake_all(const std::atomic<std::uint32_t>& word);

/// One iteration of a spin loop (`pause`, `yield`).
inline void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace libddp
