#include "libddp/memory/prefault.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "libddp/base/log.h"
#include "libddp/base/system_error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack the name.
#endif

namespace libddp {
namespace {

// Small enough that a cancel waits about a millisecond, large enough for a few huge pages.
constexpr std::size_t kPieceBytes = 4u << 20;

// For kernels before 5.14. An atomic "or" of zero faults the page in for writing and cannot lose
// what another thread stores into the same byte.
void touch_pages(std::byte* data, std::size_t size_bytes, std::size_t page_bytes) {
  for (std::size_t at = 0; at < size_bytes; at += page_bytes) {
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data + at), 0, __ATOMIC_RELAXED);
  }
}

// False when the kernel has no memory to give: the owner will find out by itself.
bool populate(std::byte* data, std::size_t size_bytes) {
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t before = reinterpret_cast<std::uintptr_t>(data) % page_bytes;
  for (;;) {
    if (::madvise(data - before, size_bytes + before, MADV_POPULATE_WRITE) == 0) return true;
    if (errno == EINTR) continue;
    if (errno == EINVAL) {
      touch_pages(data, size_bytes, page_bytes);
      return true;
    }
    log(LogLevel::Warn, "prefault_stopped",
        {{"bytes", size_bytes}, {"reason", errno_text("madvise", errno)}});
    return false;
  }
}

// The queue and its thread, of one process. Never destroyed: the thread may run during exit().
class Prefaulter {
 public:
  static Prefaulter& instance();

  void add(std::shared_ptr<PrefaultJob> job);
  bool is_current() const { return made_.is_current(); }

 private:
  void start();
  void run();

  ProcessStamp made_;
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::shared_ptr<PrefaultJob>> jobs_;
  bool started_ = false;
};

std::atomic<Prefaulter*> current{nullptr};

Prefaulter& Prefaulter::instance() {
  Prefaulter* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->is_current()) return *found;
  // First use, or first use after fork(): the parent's lock may be held by a thread that does not
  // exist here, so its object is left alone.
  auto fresh = std::make_unique<Prefaulter>();
  if (current.compare_exchange_strong(found, fresh.get())) return *fresh.release();
  return *found;
}

void Prefaulter::add(std::shared_ptr<PrefaultJob> job) {
  {
    const std::lock_guard lock(mutex_);
    if (!started_) start();
    if (!started_) return;
    jobs_.push_back(std::move(job));
  }
  added_.notify_one();
}

void Prefaulter::start() {
  // Signals belong to the program's threads: new threads inherit a full mask.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread([this] { run(); });
    ::pthread_setname_np(thread.native_handle(), "libddp-prefault");
    thread.detach();
    started_ = true;
  } catch (const std::system_error& error) {
    // Blocks are then faulted in by their users, which is slower and otherwise the same.
    log(LogLevel::Warn, "prefault_thread_failed", {{"reason", error.what()}});
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Prefaulter::run() {
  for (;;) {
    std::shared_ptr<PrefaultJob> job;
    {
      std::unique_lock lock(mutex_);
      added_.wait(lock, [this] { return !jobs_.empty(); });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    while (job->run_piece()) {
    }
  }
}

}  // namespace

void PrefaultJob::cancel() noexcept {
  // In a child of fork() nobody works on the job, whatever the flags say.
  if (!made_.is_current()) return;
  cancelled_.store(true);
  running_.wait(true);
}

bool PrefaultJob::run_piece() {
  bool more = false;
  running_.store(true);
  if (!cancelled_.load()) {
    const std::size_t piece = std::min(kPieceBytes, size_bytes_ - finished_bytes_);
    const bool populated = populate(data_ + finished_bytes_, piece);
    finished_bytes_ += piece;
    more = populated && finished_bytes_ < size_bytes_;
    if (!more) done_.store(true, std::memory_order_release);
  }
  running_.store(false);
  running_.notify_all();
  return more;
}

std::shared_ptr<PrefaultJob> prefault(std::byte* data, std::size_t size_bytes) {
  auto job = std::make_shared<PrefaultJob>(data, size_bytes);
  Prefaulter::instance().add(job);
  return job;
}

}  // namespace libddp
