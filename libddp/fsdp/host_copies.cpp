#include "libddp/fsdp/host_copies.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace libddp {

HostCopies::Direction::Direction(c10::Device device)
    : stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
      last(device.type()) {}

void HostCopies::Direction::copy(const at::Tensor& to, const at::Tensor& from) {
  to.copy_(from, /*non_blocking=*/true);
  last.record(stream);
  is_running = true;
}

HostCopies::HostCopies(c10::Device device) : in_(device), out_(device) {}

void HostCopies::finish() {
  if (!in_.is_running && !out_.is_running) return;
  if (in_.is_running && out_.is_running) {
    in_.last.block(out_.stream);
    out_.last.record(out_.stream);
  }
  (out_.is_running ? out_ : in_).last.synchronize();
  in_.is_running = out_.is_running = false;
}

}  // namespace libddp
