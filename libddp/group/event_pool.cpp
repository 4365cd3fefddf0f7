#include "libddp/group/event_pool.h"

#include <mutex>
#include <utility>
#include <vector>

namespace libddp {

struct EventPool::State {
  const c10::DeviceType type;
  const c10::EventFlag flag;
  std::mutex mutex;
  std::vector<std::unique_ptr<c10::Event>> idle{};
};

EventPool::EventPool(c10::DeviceType type, c10::EventFlag flag)
    : state_(new State{.type = type, .flag = flag, .mutex = {}}) {}

EventPool::Handle EventPool::take() {
  std::unique_ptr<c10::Event> event;
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->idle.empty()) {
      event = std::move(state_->idle.back());
      state_->idle.pop_back();
    }
  }
  if (!event) event = std::make_unique<c10::Event>(state_->type, state_->flag);
  return {event.release(), GiveBack{state_}};
}

void EventPool::GiveBack::operator()(c10::Event* done) const {
  std::unique_ptr<c10::Event> back(done);
  const std::lock_guard lock(state->mutex);
  state->idle.push_back(std::move(back));
}

}  // namespace libddp
