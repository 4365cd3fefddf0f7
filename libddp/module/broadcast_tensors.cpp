#include "libddp/module/broadcast_tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "libddp/group/expanded.h"
#include "libddp/group/operand.h"

namespace libddp {
namespace {

/// A 1-D tensor over `tensor`'s elements, or a copy of them where they do not lie in one piece.
at::Tensor flattened(const at::Tensor& tensor) { return tensor.contiguous().view({-1}); }

/// Elements of one message; whole elements of the largest dtype.
std::int64_t elements_per_message(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(TensorBroadcaster::kMaxMessageBytes / tensor.element_size());
}

}  // namespace

void TensorBroadcaster::broadcast(const std::vector<at::Tensor>& tensors, int root,
                                  std::string_view label) {
  if (group_->size() == 1) return;
  const c10::NoGradGuard no_grad;
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    const bool is_known =
        std::find(devices.begin(), devices.end(), tensor.device()) != devices.end();
    if (!is_known) devices.push_back(tensor.device());
  }
  for (const c10::Device device : devices) broadcast_on(device, tensors, root, label);
}

void TensorBroadcaster::broadcast_on(c10::Device device, const std::vector<at::Tensor>& tensors,
                                     int root, std::string_view label) {
  std::vector<at::Tensor> parts;
  std::size_t bytes = 0;
  for (const at::Tensor& each : tensors) {
    if (each.device() != device) continue;
    const at::Tensor tensor = without_repeats(each.detach(), each);
    const at::Tensor flat = flattened(tensor);
    const std::int64_t step = elements_per_message(flat);
    for (std::int64_t begin = 0; begin < flat.numel(); begin += step) {
      const at::Tensor part = flat.narrow(0, begin, std::min(step, flat.numel() - begin));
      if (bytes + part.nbytes() > kMaxMessageBytes) {
        send(parts, bytes, root, label);
        parts.clear();
        bytes = 0;
      }
      parts.push_back(part);
      bytes += part.nbytes();
    }
    const bool is_copy = flat.numel() > 0 && flat.const_data_ptr() != tensor.const_data_ptr();
    if (!is_copy) continue;
    send(parts, bytes, root, label);
    parts.clear();
    bytes = 0;
    if (group_->rank() == root) continue;
    // As in torch, a graph that has saved a buffer does not learn that it is another one's now.
    const at::AutoDispatchBelowADInplaceOrView quiet;
    tensor.copy_(flat.view(tensor.sizes()));
  }
  send(parts, bytes, root, label);
}

at::Tensor TensorBroadcaster::staging(std::size_t bytes, c10::Device device) {
  at::Tensor& kept = staging_[device];
  if (!kept.defined() || kept.nbytes() < bytes) {
    kept = at::Tensor();
    kept = group_->allocate({static_cast<std::int64_t>(bytes)}, at::kByte, device);
  }
  return kept.narrow(0, 0, static_cast<std::int64_t>(bytes));
}

void TensorBroadcaster::send(const std::vector<at::Tensor>& parts, std::size_t bytes, int root,
                             std::string_view label) {
  if (parts.empty()) return;
  const at::Tensor message = staging(bytes, parts.front().device());
  if (group_->rank() == root) pack(parts, message);
  group_->broadcast(message, root, {.async = false, .timeout = {}, .label = label});
  if (group_->rank() != root) unpack(message, parts);
}

}  // namespace libddp
