#include "libddp/ddp/device_gradients.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace libddp {
namespace {

void note_owner(std::vector<c10::Stream>& owners, const std::optional<c10::Stream>& stream,
                const c10::Stream& here) {
  const bool is_known = std::find(owners.begin(), owners.end(), stream) != owners.end();
  if (stream && *stream != here && !is_known) owners.push_back(*stream);
}

}  // namespace

/// What is launched together, on one stream.
struct DeviceGradients::Batch {
  explicit Batch(const c10::Stream& on) : stream(on) {}

  /// A gradient that has fired, or has been left by an earlier pass.
  void add(GradientSlot& slot) {
    const at::Tensor& grad = slot.parameter().grad();
    if (slot.shows_bucket()) {
      if (slot.is_apart()) leaving.push_back(&slot);
      return;
    }
    replaced.push_back(&slot);
    if (!grad.defined()) {
      zeros.push_back(slot.view());
    } else if (grad.numel() > 0) {
      to.push_back(slot.view());
      from.push_back(grad);
    }
  }
  void launch() const {
    const c10::NoGradGuard no_grad;
    const c10::StreamGuard guard(stream);
    for (GradientSlot* slot : leaving) slot->leave_view();
    for (GradientSlot* slot : replaced) slot->leave_to_keepers();
    if (!to.empty()) at::_foreach_copy_(to, from);
    if (!zeros.empty()) at::_foreach_zero_(zeros);
  }

  c10::Stream stream;
  std::vector<at::Tensor> to;
  /// They live as long as the batch: until whoever owns their memory is behind the copy.
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> zeros;
  std::vector<GradientSlot*> leaving;
  std::vector<GradientSlot*> replaced;
};

DeviceGradients::DeviceGradients(c10::Device device, std::size_t num_parameters)
    : device_(device), streams_(num_parameters), event_(device.type()) {}

void DeviceGradients::collect(std::vector<GradientSlot>& slots,
                              const std::vector<std::size_t>& members,
                              const std::vector<std::uint32_t>& num_fired) {
  const c10::Stream here = current_stream_on(device_);
  std::vector<Batch> batches = {Batch(here)};
  std::vector<c10::Stream> owners;
  const auto batch_on = [&](const c10::Stream& stream) -> Batch& {
    for (Batch& batch : batches) {
      if (batch.stream == stream) return batch;
    }
    return batches.emplace_back(stream);
  };
  std::vector<GradientSlot*> adopted;
  for (const std::size_t index : members) {
    GradientSlot& slot = slots[index];
    const bool has_fired = num_fired[index] > 0 && streams_[index];
    if (!has_fired && slot.has_gradient()) {
      slot.check_gradient();
      note_owner(owners, streams_[index], here);
    }
    batch_on(has_fired ? *streams_[index] : here).add(slot);
    if (has_fired || slot.has_gradient()) adopted.push_back(&slot);
  }
  for (const Batch& batch : batches) {
    batch.launch();
    if (batch.stream != here) order(batch.stream, here);
  }
  for (GradientSlot* slot : adopted) slot->show_bucket();
  for (const c10::Stream& owner : owners) order(here, owner);
}

void DeviceGradients::moved() {
  const c10::Stream here = current_stream_on(device_);
  std::vector<c10::Stream> owners;
  for (const std::optional<c10::Stream>& stream : streams_) note_owner(owners, stream, here);
  for (const c10::Stream& owner : owners) order(here, owner);
}

void DeviceGradients::order(const c10::Stream& first, const c10::Stream& second) {
  event_.record(first);
  event_.block(second);
}

void install(const std::vector<GradientSlot*>& slots) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (GradientSlot* slot : slots) {
    if (!slot->takes_values()) {
      slot->install();
      continue;
    }
    to.push_back(slot->parameter().grad());
    from.push_back(slot->view());
  }
  if (to.empty()) return;
  const c10::NoGradGuard no_grad;
  at::_foreach_copy_(to, from);
}

}  // namespace libddp
