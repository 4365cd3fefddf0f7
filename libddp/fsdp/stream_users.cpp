#include "libddp/fsdp/stream_users.h"

#include <c10/core/Event.h>

#include <algorithm>

namespace libddp {

bool StreamUsers::add_current() {
  const c10::Stream current = current_stream_on(device_);
  if (std::find(streams_.begin(), streams_.end(), current) != streams_.end()) return false;
  streams_.push_back(current);
  return true;
}

// Recorded when somebody asks: what the stream has launched since then counts too.
void StreamUsers::order(const c10::Stream& stream) const {
  for (const c10::Stream& user : streams_) {
    if (user == stream) continue;
    c10::Event event(device_.type());
    event.record(user);
    event.block(stream);
  }
}

}  // namespace libddp
