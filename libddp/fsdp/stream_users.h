#pragma once

// The streams of a device that have used some memory, so that who uses it next comes behind them.
// With one stream, the usual case, no event is ever made: its order is enough.
// Thread rule: one thread at a time.
//
//   users.add_current();     // the current stream reads the buffer
//   users.order_current();   // later, in another stream: behind what the first has by now

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

#include "libddp/group/current_stream.h"

namespace libddp {

class StreamUsers {
 public:
  explicit StreamUsers(c10::Device device) : device_(device) {}

  /// True if the stream was not among them.
  bool add_current();
  /// The current stream waits for what the others have launched so far.
  void order_current() const { order(current_stream_on(device_)); }
  void order(const c10::Stream& stream) const;
  const std::vector<c10::Stream>& streams() const { return streams_; }
  bool is_empty() const { return streams_.empty(); }
  void clear() { streams_.clear(); }

 private:
  c10::Device device_;
  std::vector<c10::Stream> streams_;
};

}  // namespace libddp
