#include "libddp/group/event_pool.h"

#include <utility>

namespace libddp {

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
  return {event.release(), [state = state_](c10::Event* done) {
            std::unique_ptr<c10::Event> back(done);
            const std::lock_guard lock(state->mutex);
            state->idle.push_back(std::move(back));
          }};
}

}  // namespace libddp
