#pragma once

// Gradients on a device, on their way into the buckets and out of them: with few launches, and in
// the right order of streams.
//
// NOTE [Gradients on a device]
// A hook copies nothing. It notes the stream on which autograd has accumulated the gradient, which
// is current there. When the bucket is about to be sent, one launch copies all of its gradients and
// casts them where their dtype is another one; those that stand in the bucket already (autograd
// adds in place where `.grad` is the view) need none.
// Each gradient is copied on the stream of its accumulation: that is behind it, and the memory of a
// gradient that the view replaces is given back behind the copy, as torch's caching allocator
// demands. The stream that is current when the bucket is sent then waits for the others, by events.
// Usually there is one stream only, hence one launch and no event.
// What has fired in an earlier pass only (no_sync) is copied on the current stream, which is behind
// that pass and whatever the script has done with `.grad` since; the gradient's own stream waits
// for the copy before the memory is given back. So it does where gradients move to other buckets.
//
// Thread rule: as Reducer; `collect` from the thread that sends the bucket.
//
//   DeviceGradients gradients(device, slots.size());
//   gradients.arrived(index);                                 // in the gradient's hook
//   gradients.collect(slots, buckets.members(0), num_fired);  // the current stream has them all
//   install(copied_slots);                                    // `.grad` gets the averages

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "libddp/ddp/gradient_slot.h"
#include "libddp/group/current_stream.h"

namespace libddp {

class DeviceGradients {
 public:
  DeviceGradients(c10::Device device, std::size_t num_parameters);

  /// Autograd has accumulated a gradient, in the current stream.
  void arrived(std::size_t index) { streams_[index] = current_stream_on(device_); }
  /// It has come to the parameter, which stays without one.
  void came_without(std::size_t index) { streams_[index].reset(); }

  /// ENSURES, for what is launched on the current stream from now on: the pieces of `members` hold
  /// their gradients, or zeros where there is none. `.grad` is the view where one has fired in this
  /// pass or was defined before, unless it stays apart. Throws as GradientSlot::adopt.
  void collect(std::vector<GradientSlot>& slots, const std::vector<std::size_t>& members,
               const std::vector<std::uint32_t>& num_fired);
  /// The current stream has copied gradients elsewhere, whose memory has been given back, or has
  /// changed them in place.
  void moved();

 private:
  struct Batch;

  void order(const c10::Stream& first, const c10::Stream& second);

  const c10::Device device_;
  /// By parameter: where its gradient was accumulated last.
  std::vector<std::optional<c10::Stream>> streams_;
  /// Recorded anew for each order: those who wait for it have been told what for.
  c10::Event event_;
};

/// `.grad` of each of these gets what has become of its copy in the bucket: the view, or the values
/// where it stays apart, those of all of them by one launch.
void install(const std::vector<GradientSlot*>& slots);

}  // namespace libddp
