// Frames between processes of one host (frame.h).

#include <unistd.h>

#include <chrono>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/transport/frame.h"
#include "libddp/transport/unix_socket.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

constexpr FrameLimits kLimits{.max_bytes = 1024, .max_descriptors = 4};

// What was understood can be said again, with descriptors, and is then the same.
void say_again(const Frame& frame, std::size_t num_descriptors) {
  const fuzz::Pair pair = fuzz::Pair::make();
  const std::vector<int> passed(num_descriptors, pair.ours.get());
  send_frame(pair.theirs.get(), frame.bytes, passed, Deadline::never());
  const bool is_too_many = num_descriptors > kLimits.max_descriptors;
  try {
    fuzz::require(is_frame_complete(pair.ours.get(), kLimits));
    const Frame again = receive_frame(pair.ours.get(), kLimits, Deadline::never());
    fuzz::require(again.bytes == frame.bytes && again.descriptors.size() == num_descriptors);
    fuzz::require(!is_too_many);
  } catch (const NetworkError&) {
    fuzz::require(is_too_many);
  }
}

// Somebody who stops in the middle is waited for until the deadline.
void wait_in_vain(int socket, std::chrono::milliseconds patience) {
  try {
    receive_frame(socket, kLimits, Deadline::after(patience));
  } catch (const TimeoutError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes input(data, size);
  const fuzz::Pair pair = fuzz::Pair::make();
  pair.send(input.piece());
  try {
    if (is_frame_complete(pair.ours.get(), kLimits)) {
      const Frame frame = receive_frame(pair.ours.get(), kLimits, Deadline::never());
      fuzz::require(frame.bytes.size() <= kLimits.max_bytes && frame.descriptors.empty());
      say_again(frame, size % 6);
    } else if (size % 8 == 0) {
      // The one input that every run begins with may take its time.
      wait_in_vain(pair.ours.get(), std::chrono::milliseconds(size == 0 ? 1 : 0));
    }
    pair.send(input.rest());
    pair.end();
    while (true) {
      const Frame frame = receive_frame(pair.ours.get(), kLimits, Deadline::never());
      fuzz::require(frame.bytes.size() <= kLimits.max_bytes);
    }
  } catch (const NetworkError&) {
  }
  return 0;
}
