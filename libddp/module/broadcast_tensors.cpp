#include "libddp/module/broadcast_tensors.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

namespace libddp {
namespace {

/// A 1-D tensor over `tensor`'s elements, or a copy of them where they do not lie in one piece.
at::Tensor flattened(const at::Tensor& tensor) { return tensor.detach().contiguous().view({-1}); }

/// Elements of one message; whole elements of the largest dtype.
std::int64_t elements_per_message(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(TensorBroadcaster::kMaxMessageBytes / tensor.element_size());
}

/// Parts of any dtype one after another in a message of bytes.
class Packing {
 public:
  Packing(const at::Tensor& message, const std::vector<at::Tensor>& parts)
      : message_(message), parts_(parts) {}

  void pack() const {
    if (!message_.is_cpu()) return at::_foreach_copy_(places(), bytes());
    auto* next = static_cast<std::byte*>(message_.data_ptr());
    for (const at::Tensor& part : parts_) {
      std::memcpy(next, part.const_data_ptr(), part.nbytes());
      next += part.nbytes();
    }
  }
  void unpack() const {
    if (!message_.is_cpu()) return at::_foreach_copy_(bytes(), places());
    const auto* next = static_cast<const std::byte*>(message_.const_data_ptr());
    for (const at::Tensor& part : parts_) {
      std::memcpy(part.data_ptr(), next, part.nbytes());
      next += part.nbytes();
    }
  }

 private:
  std::vector<at::Tensor> bytes() const {
    std::vector<at::Tensor> views;
    for (const at::Tensor& part : parts_) views.push_back(part.view(at::kByte));
    return views;
  }
  std::vector<at::Tensor> places() const {
    std::vector<at::Tensor> views;
    std::int64_t begin = 0;
    for (const at::Tensor& part : parts_) {
      const auto length = static_cast<std::int64_t>(part.nbytes());
      views.push_back(message_.narrow(0, begin, length));
      begin += length;
    }
    return views;
  }

  const at::Tensor& message_;
  const std::vector<at::Tensor>& parts_;
};

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
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() != device) continue;
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
    if (group_->rank() != root) tensor.detach().copy_(flat.view(tensor.sizes()));
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
  const Packing packing(message, parts);
  if (group_->rank() == root) packing.pack();
  group_->broadcast(message, root, {.async = false, .timeout = {}, .label = label});
  if (group_->rank() != root) packing.unpack();
}

}  // namespace libddp
