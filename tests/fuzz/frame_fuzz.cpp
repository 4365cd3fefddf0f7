// Frames between processes of one host (unix_socket.h).

#include "libddp/base/error.h"
#include "libddp/transport/unix_socket.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr FrameLimits kLimits{.max_bytes = 1024, .max_descriptors = 4};
  fuzz::Bytes input(data, size);
  const fuzz::Pair pair = fuzz::Pair::make();
  pair.send(input.piece());
  try {
    if (is_frame_complete(pair.ours.get(), kLimits)) {
      const Frame frame = receive_frame(pair.ours.get(), kLimits, Deadline::never());
      fuzz::require(frame.bytes.size() <= kLimits.max_bytes && frame.descriptors.empty());
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
