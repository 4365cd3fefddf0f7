#pragma once

// Copies between a device and memory of the host, beside the computation: two streams, one for each
// direction, which all units of a group share on a device, and what the host has to wait for before
// it may use its memory. For parameters that are offloaded, see NOTE [Offloading].
//
// NOTE [Offloading]
// Shards, their gradients and so the optimizer's state lie in the host's memory, page-locked unless
// the caller wants it otherwise. What a device has of them are buffers of the pool: a unit's block
// is copied into one in a stream of its own, from where it is gathered, while the unit before it
// computes; the block of averages is copied back in another stream, while the backward goes on. So
// the device's memory is bounded as it is without offloading. Blocks travel in the dtype that they
// have on the host, and are converted on the device: a conversion by the host would be work that
// nothing runs beside, and copies hide behind the computation.
// The host waits once per pass, at its end, for both directions: averages can be read then, and
// parameters be written. So it does at the end of a forward without gradients. Averages are added
// to gradients that are there by the host, behind that wait, as in torch.
// Thread rule: one thread at a time.
//
//   { c10::StreamGuard guard(copies.to_device()); copies.copy_in(on_device, block); }
//   { c10::StreamGuard guard(copies.to_host()); copies.copy_out(gradients, averages); }
//   copies.finish();   // the host may use `block` and `gradients`

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace libddp {

class HostCopies {
 public:
  explicit HostCopies(c10::Device device);

  const c10::Stream& to_device() const { return in_.stream; }
  const c10::Stream& to_host() const { return out_.stream; }

  /// From the host, in `to_device`, and to it, in `to_host`; each in the order of its stream, which
  /// is current.
  void copy_in(const at::Tensor& to, const at::Tensor& from) { in_.copy(to, from); }
  void copy_out(const at::Tensor& to, const at::Tensor& from) { out_.copy(to, from); }
  /// The host waits for all copies that it has not waited for yet; once for both directions.
  void finish();

 private:
  struct Direction {
    explicit Direction(c10::Device device);
    void copy(const at::Tensor& to, const at::Tensor& from);

    c10::Stream stream;
    /// Behind the last copy.
    c10::Event last;
    bool is_running = false;
  };

  Direction in_;
  Direction out_;
};

}  // namespace libddp
