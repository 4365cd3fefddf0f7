#pragma once

// The calling thread's current stream on a device: what it launches there now goes into it.
// Thread rule: any thread.
//
//   const c10::Stream caller = current_stream_on(tensor.device());

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace libddp {

inline c10::Stream current_stream_on(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace libddp
