#include "libddp/transport/wakeup.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

static_assert(sizeof(std::atomic<std::uint32_t>) == 4 &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "the kernel reads the word as 32 plain bits");

// Not FUTEX_PRIVATE_FLAG: the sleepers may be other processes.
long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  return ::syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&word), operation, value,
                   limit, nullptr, 0);
}

}  // namespace

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds limit) {
  if (limit <= std::chrono::nanoseconds::zero()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec relative{};
  relative.tv_sec = static_cast<time_t>(seconds.count());
  relative.tv_nsec = static_cast<long>((limit - seconds).count());
  if (futex(word, FUTEX_WAIT, expected, &relative) == 0) return;
  if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return;
  throw Error(fmt::format("libddp: cannot wait on shared memory: {}.",
                          errno_text("futex(FUTEX_WAIT)", errno)));
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  if (futex(word, FUTEX_WAKE, INT_MAX, nullptr) >= 0) return;
  throw Error(fmt::format("libddp: cannot wake waiters on shared memory: {}.",
                          errno_text("futex(FUTEX_WAKE)", errno)));
}

}  // namespace libddp
