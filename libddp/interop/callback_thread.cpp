#include "libddp/interop/callback_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "libddp/base/process.h"

namespace libddp {

/// Of the thread that runs now.
struct CallbackPlace {
  const ProcessGroup* group = nullptr;
  int depth = 0;
};

namespace {

/// A callback that waits for what a callback issued that waits ... this deep does not exist; a
/// chain of callbacks that do not wait may be longer and uses the threads again.
constexpr int kMaxDepth = 8;

thread_local CallbackPlace here;

using Chain = std::map<int, std::shared_ptr<CallbackThread>>;

struct Registry {
  std::mutex mutex;
  std::map<const ProcessGroup*, Chain> chains;
  const ProcessStamp made;
};

/// Never freed: posts may come from threads that outlive static destructors.
Registry& registry() {
  static Registry* const instance = new Registry();
  return *instance;
}

}  // namespace

struct CallbackThread::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool is_stopped = false;
  std::thread thread;
  CallbackPlace place;
};

std::shared_ptr<CallbackThread> CallbackThread::of(const ProcessGroup* group) {
  Registry& known = registry();
  std::lock_guard lock(known.mutex);
  int depth = here.group == group ? here.depth + 1 : 0;
  if (depth == kMaxDepth) depth = 1;
  auto& thread = known.chains[group][depth];
  if (!thread) thread = std::make_shared<CallbackThread>(group, depth);
  return thread;
}

void CallbackThread::release(const ProcessGroup* group) {
  Chain last;  // freed without the lock
  Registry& known = registry();
  if (!known.made.is_current()) return;
  std::lock_guard lock(known.mutex);
  const auto entry = known.chains.find(group);
  if (entry == known.chains.end()) return;
  last = std::move(entry->second);
  known.chains.erase(entry);
}

void CallbackThread::stop_all() {
  Registry& known = registry();
  if (!known.made.is_current()) return;
  std::map<const ProcessGroup*, Chain> chains;
  {
    std::lock_guard lock(known.mutex);
    chains = known.chains;
  }
  for (const auto& [group, chain] : chains) {
    for (const auto& [depth, thread] : chain) thread->stop_and_join();
  }
}

CallbackThread::CallbackThread(const ProcessGroup* group, int depth)
    : queue_(std::make_shared<Queue>()) {
  queue_->place = {group, depth};
}

CallbackThread::~CallbackThread() {
  std::lock_guard lock(queue_->mutex);
  queue_->is_stopped = true;
  queue_->changed.notify_one();
  if (queue_->thread.joinable()) queue_->thread.detach();
}

void CallbackThread::post(std::function<void()> task) {
  {
    std::lock_guard lock(queue_->mutex);
    if (!queue_->is_stopped) {
      if (!queue_->thread.joinable())
        queue_->thread = std::thread([queue = queue_] { run(queue); });
      queue_->tasks.push_back(std::move(task));
      queue_->changed.notify_one();
      return;
    }
  }
  task();
}

void CallbackThread::stop_and_join() {
  std::thread thread;
  {
    std::lock_guard lock(queue_->mutex);
    queue_->is_stopped = true;
    thread = std::move(queue_->thread);
    queue_->changed.notify_one();
  }
  if (thread.joinable()) thread.join();
}

void CallbackThread::run(const std::shared_ptr<Queue>& queue) {
  pthread_setname_np(pthread_self(), "libddp_futures");
  here = queue->place;
  std::unique_lock lock(queue->mutex);
  while (true) {
    queue->changed.wait(lock, [&] { return queue->is_stopped || !queue->tasks.empty(); });
    if (queue->tasks.empty()) return;
    auto task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes away without the lock
    lock.lock();
  }
}

}  // namespace libddp
