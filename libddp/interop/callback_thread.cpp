#include "libddp/interop/callback_thread.h"

#include <pthread.h>

#include <utility>

namespace libddp {
namespace {

// Both are replaced in a forked child: the thread is gone there and its lock may be held.
CallbackThread* current = nullptr;
std::once_flag created;

}  // namespace

CallbackThread& CallbackThread::instance() {
  std::call_once(created, [] {
    // Never freed: posts may come from threads that outlive static destructors.
    current = new CallbackThread();
    pthread_atfork(nullptr, nullptr, [] { current = new CallbackThread(); });
  });
  return *current;
}

void CallbackThread::post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (!is_stopped_) {
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      tasks_.push_back(std::move(task));
      changed_.notify_one();
      return;
    }
  }
  task();
}

void CallbackThread::stop() {
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    thread = std::move(thread_);
    changed_.notify_one();
  }
  if (thread.joinable()) thread.join();
}

void CallbackThread::run() {
  pthread_setname_np(pthread_self(), "libddp_futures");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopped_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes away without the lock
    lock.lock();
  }
}

}  // namespace libddp
