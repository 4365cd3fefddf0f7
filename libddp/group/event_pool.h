#pragma once

// Events of one device that are used again: making one costs more than recording it.
//
// An event may be recorded again as soon as the streams that wait for it have been told so, and
// once nobody asks for its state any more.
// Thread rule: any thread; an event belongs to one at a time. Events may outlive the pool.
//
//   EventPool::Handle end = pool.take();
//   end->record(stream);
//   end->block(other);    // `other` waits for what `stream` had by then

#include <c10/core/Event.h>

#include <memory>

namespace libddp {

class EventPool {
 public:
  struct State;
  struct GiveBack {
    std::shared_ptr<State> state;
    void operator()(c10::Event* done) const;
  };
  /// Goes back to the pool when its owner lets go.
  using Handle = std::unique_ptr<c10::Event, GiveBack>;

  /// `flag`: BACKEND_DEFAULT for events that can tell the time between them.
  explicit EventPool(c10::DeviceType type, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT);

  Handle take();

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace libddp
