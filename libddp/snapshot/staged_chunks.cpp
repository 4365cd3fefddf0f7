#include "libddp/snapshot/staged_chunks.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

namespace libddp {
namespace {

constexpr std::size_t kNothing = static_cast<std::size_t>(-1);

std::vector<std::uint64_t> sizes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint64_t> sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.nbytes());
  return sizes;
}

/// The tensor itself where its memory is what it stands for.
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

}  // namespace

StagedChunks::StagedChunks(std::vector<at::Tensor> tensors, std::size_t first)
    : kept_(readable(std::move(tensors))), parts_(sizes_of(kept_)) {
  find_sources();
  if (!lines_.empty()) make_places(first);
}

std::vector<at::Tensor> StagedChunks::readable(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) {
    tensor = tensor.detach();
    if (tensor.is_cpu()) tensor = dense(tensor);
  }
  return tensors;
}

void StagedChunks::find_sources() {
  for (const at::Tensor& tensor : kept_) {
    Source source;
    source.left = tensor.nbytes();
    if (tensor.is_cpu()) {
      source.on_host = static_cast<const std::byte*>(tensor.const_data_ptr());
    } else if (source.left > 0) {
      source.on_device = tensor;
      source.line = lines_.line_to(tensor.device());
    }
    sources_.push_back(std::move(source));
  }
}

at::Tensor StagedChunks::bytes_of(Source& source) {
  if (!source.dense.defined()) source.dense = dense(source.on_device);
  // Memory that is only read: its tensor may share it with others until one of them is written.
  const auto address = reinterpret_cast<std::uintptr_t>(source.dense.const_data_ptr());
  return DeviceLines::bytes_at(address, source.dense.nbytes(), source.dense.device());
}

void StagedChunks::make_places(std::size_t first) {
  const std::size_t left = num_chunks(total()) - std::min(first, num_chunks(total()));
  for (std::size_t i = 0; i < std::min(DeviceLines::kPlaces, left); ++i) {
    places_.push_back({lines_.make_place(), kNothing});
  }
  for (std::size_t i = 0; i < places_.size(); ++i) bring(first + i);
}

void StagedChunks::bring(std::size_t index) {
  if (index >= num_chunks(total())) return;
  const std::lock_guard lock(mutex_);
  Place& place = places_[index % places_.size()];
  parts_.each(index, [&](const ChunkParts::Part& part) {
    Source& source = sources_[part.source];
    if (!source.on_device.defined()) return;
    const auto bytes = static_cast<std::int64_t>(part.bytes);
    const c10::StreamGuard beside(lines_.stream(source.line));
    place.memory.narrow(0, static_cast<std::int64_t>(part.at), bytes)
        .copy_(bytes_of(source).narrow(0, static_cast<std::int64_t>(part.from), bytes),
               /*non_blocking=*/true);
    source.left -= part.bytes;
    if (source.left == 0) source.dense = at::Tensor();  // what the line is given next comes behind
  });
  lines_.record(place);
  place.chunk = index;
  changed_.notify_all();
}

StagedChunks::Place& StagedChunks::await(std::size_t index) {
  Place& place = places_[index % places_.size()];
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return place.chunk == index || error_; });
    if (error_) std::rethrow_exception(error_);
  }
  DeviceLines::wait(place);
  return place;
}

std::uint32_t StagedChunks::copy(std::size_t index, std::byte* to) {
  try {
    const std::byte* const staged = lines_.empty() ? nullptr : await(index).data;
    const std::uint32_t sum = parts_.copy(index, to, [&](const ChunkParts::Part& part) {
      const Source& source = sources_[part.source];
      return source.on_device.defined() ? staged + part.at : source.on_host + part.from;
    });
    if (!lines_.empty()) bring(index + places_.size());
    return sum;
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

// Others wait for chunks that nobody brings any more.
void StagedChunks::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  changed_.notify_all();
}

}  // namespace libddp
