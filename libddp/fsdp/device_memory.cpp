#include "libddp/fsdp/device_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>

namespace libddp {
namespace {

/// A tensor of a storage that has no memory yet.
at::Tensor flat_over(const c10::Storage& storage, std::int64_t numel, at::ScalarType dtype) {
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()))
      .set_(storage, 0, {numel}, {1});
}

}  // namespace

DeviceMemory::DeviceMemory(Spec spec, std::shared_ptr<DeviceBuffers> pool)
    : FlatMemory(std::move(spec)), pool_(std::move(pool)), filled_in_(spec_.device) {
  const c10::NoGradGuard no_grad;
  const FlatLayout& layout = spec_.layout;
  const at::TensorOptions options = at::TensorOptions().dtype(spec_.dtype).device(spec_.device);
  make_own_block(spec_.group && !is_offloaded()
                     ? spec_.group->allocate({layout.block_numel()}, spec_.dtype, spec_.device)
                     : at::empty({layout.block_numel()}, spec_.home.value_or(options)));
  own_block().zero_();
  storage_ = borrowed_storage(layout.whole_numel());
  gathered_ = places_in_whole();
  const bool sends_another = computes_low() || is_offloaded();
  if (sends_another) sent_storage_ = borrowed_storage(layout.block_numel());
  sent_ =
      parts_of(sends_another ? flat_over(sent_storage_, layout.block_numel(), spec_.compute_dtype)
                             : own_block());
}

// What is under way keeps its memory.
DeviceMemory::~DeviceMemory() {
  if (!whole_) return;
  // Also where somebody has waited, and was told that the group has failed. The parameters' own
  // memory may go next.
  if (work_) work_->order_stream();
  if (!whole_->users.is_empty()) return;
  if (!work_ && is_offloaded()) {
    const c10::StreamGuard guard(pool_->host_copies().to_device());
    whole_->users.add_current();
  }
  if (!work_) return;
  work_->on_complete([whole = whole_->bytes, low = low_ ? low_->bytes : at::Tensor()](Work&) {});
}

std::vector<at::Tensor> DeviceMemory::parts_of(const at::Tensor& block) const {
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < spec_.layout.size(); ++i) {
    const std::int64_t chunk = spec_.layout.chunk_numel(i);
    if (chunk > 0) parts.push_back(block.narrow(0, spec_.layout.shard_offset(i), chunk));
  }
  return parts;
}

std::vector<at::Tensor> DeviceMemory::places_in_whole() const {
  const at::Tensor whole = flat_over(storage_, spec_.layout.whole_numel(), spec_.compute_dtype);
  std::vector<at::Tensor> places;
  for (std::size_t i = 0; i < spec_.layout.size(); ++i) {
    const std::int64_t numel = spec_.layout.chunk_numel(i) * world_size();
    if (numel > 0) places.push_back(whole.narrow(0, spec_.layout.offset(i), numel));
  }
  return places;
}

// Before anything is sent: who has no memory may go on when there is some.
DeviceBuffer DeviceMemory::take(std::int64_t numel, at::ScalarType dtype) {
  try {
    return pool_->take(numel, dtype);
  } catch (c10::Error& error) {
    error.add_context(fmt::format("libddp {}: {} bytes for its parameters on {}", label(),
                                  static_cast<std::size_t>(numel) * c10::elementSize(dtype),
                                  spec_.device.str()));
    throw;
  }
}

void DeviceMemory::take_whole() {
  whole_ = take(spec_.layout.whole_numel(), spec_.compute_dtype);
  point(storage_, whole_->bytes.data_ptr());
}

void DeviceMemory::give_whole() {
  point(storage_, nullptr);
  pool_->give(std::move(*whole_));
  whole_.reset();
}

void DeviceMemory::begin_unshard() {
  if (!whole_ && (world_size() > 1 || is_offloaded())) fill();
}

void DeviceMemory::fill() {
  const c10::NoGradGuard no_grad;
  const c10::OptionalStreamGuard guard(
      is_offloaded() ? std::optional(pool_->host_copies().to_device()) : std::nullopt);
  try {
    world_size() > 1 ? gather() : convert();
  } catch (...) {
    copy_.reset();
    low_.reset();
    if (whole_) give_whole();
    throw;
  }
}

void DeviceMemory::gather() {
  if (!gathered_.empty()) {
    at::Tensor block = block_on_device();
    if (computes_low()) {
      low_ = take(spec_.layout.block_numel(), spec_.compute_dtype);
      low_->users.add_current();
      block = low_->as(spec_.layout.block_numel(), spec_.compute_dtype).copy_(block);
    }
    if (sent_storage_) point(sent_storage_, block.data_ptr());
  }
  take_whole();
  if (gathered_.empty()) return;
  work_ =
      spec_.group->all_gather_into_coalesced(gathered_, sent_, {.async = true, .label = label()});
  if (!is_offloaded()) return;
  work_->wait();
  give_block();
}

// The two orders of elements are one where one rank has all of them.
void DeviceMemory::convert() {
  const std::int64_t numel = spec_.layout.whole_numel();
  if (is_offloaded() && !computes_low()) {
    take_whole();
    pool_->host_copies().copy_in(whole_->as(numel, spec_.dtype), own_block().narrow(0, 0, numel));
  } else {
    const at::Tensor block = block_on_device();
    take_whole();
    whole_->as(numel, spec_.compute_dtype).copy_(block.narrow(0, 0, numel));
    if (is_offloaded()) give_block();
  }
  filled_in_.clear();
  filled_in_.add_current();
}

at::Tensor DeviceMemory::block_on_device() {
  if (!is_offloaded()) return own_block();
  copy_ = take(spec_.layout.block_numel(), spec_.dtype);
  copy_->users.add_current();
  at::Tensor block = copy_->as(spec_.layout.block_numel(), spec_.dtype);
  pool_->host_copies().copy_in(block, own_block());
  return block;
}

/// To who comes behind the current stream, which has waited for what was sent.
void DeviceMemory::give_block() {
  for (std::optional<DeviceBuffer>* const buffer : {&copy_, &low_}) {
    if (!*buffer) continue;
    (*buffer)->users.add_current();
    pool_->give(std::move(**buffer));
    buffer->reset();
  }
}

void DeviceMemory::unshard() {
  begin_unshard();
  if (!whole_) fill();
  if (!whole_->users.add_current()) return;
  work_ ? work_->wait() : filled_in_.order_current();
  give_block();
}

void DeviceMemory::note_use() {
  if (whole_) whole_->users.add_current();
}

void DeviceMemory::reshard() {
  if (!whole_) return;
  // A prefetch that nobody has used.
  if (whole_->users.is_empty()) unshard();
  note_use();
  work_.reset();
  give_whole();
}

void DeviceMemory::finish_copies() {
  if (is_offloaded()) pool_->host_copies().finish();
}

}  // namespace libddp
