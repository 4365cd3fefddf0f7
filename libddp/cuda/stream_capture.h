#pragma once

// Whether a stream is being captured into a CUDA graph. What is captured has not run: nobody may
// ask for its end, and it may not wait for what is outside of the graph.
// Thread rule: any thread.
//
//   if (!is_capturing(stream)) watchdog.watch(operation);

#include <c10/core/Stream.h>

namespace libddp {

bool is_capturing(const c10::Stream& stream);

/// From now on this thread may ask for events while another one captures.
void allow_queries_beside_capture();

}  // namespace libddp
