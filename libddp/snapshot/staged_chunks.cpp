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

/// Whether its memory is what it stands for.
bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

/// The tensor itself where it is dense.
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

}  // namespace

StagedChunks::StagedChunks(const std::vector<at::Tensor>& tensors, std::size_t first)
    : parts_(sizes_of(tensors)) {
  find_sources(tensors, first);
  if (!lines_.empty()) make_places(first);
}

void StagedChunks::find_sources(const std::vector<at::Tensor>& tensors, std::size_t first) {
  const std::uint64_t skipped = first * kChunkBytes;
  std::uint64_t end = 0;
  for (const at::Tensor& each : tensors) {
    Source source;
    end += each.nbytes();
    source.left = std::min<std::uint64_t>(each.nbytes(), end - std::min(skipped, end));
    source.tensor = each.detach();
    if (each.is_cpu()) {
      if (is_dense(each)) source.on_host = static_cast<const std::byte*>(each.const_data_ptr());
    } else if (source.left > 0) {
      source.line = lines_.line_to(each.device());
    }
    sources_.push_back(std::move(source));
  }
}

std::uintptr_t StagedChunks::address_of(Source& source) {
  if (!source.dense.defined()) source.dense = dense(source.tensor);
  // Memory that is only read: its tensor may share it with others until one of them is written.
  return reinterpret_cast<std::uintptr_t>(source.dense.const_data_ptr());
}

// On a device, what its line is given next comes behind.
void StagedChunks::count_read(Source& source, std::uint64_t bytes) {
  source.left -= bytes;
  if (source.left == 0) source.dense = at::Tensor();
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
    if (!source.on_device()) return;
    const auto bytes = static_cast<std::int64_t>(part.bytes);
    const c10::StreamGuard beside(lines_.stream(source.line));
    const at::Tensor all =
        DeviceLines::bytes_at(address_of(source), source.tensor.nbytes(), source.tensor.device());
    place.memory.narrow(0, static_cast<std::int64_t>(part.at), bytes)
        .copy_(all.narrow(0, static_cast<std::int64_t>(part.from), bytes), /*non_blocking=*/true);
    count_read(source, part.bytes);
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

const std::byte* StagedChunks::data_of(const ChunkParts::Part& part, const std::byte* staged) {
  Source& source = sources_[part.source];
  if (source.on_device()) return staged + part.at;
  if (source.on_host) return source.on_host + part.from;
  const std::lock_guard lock(mutex_);
  return reinterpret_cast<const std::byte*>(address_of(source)) + part.from;
}

void StagedChunks::let_go_behind(std::size_t index) {
  parts_.each(index, [&](const ChunkParts::Part& part) {
    Source& source = sources_[part.source];
    if (source.on_device() || source.on_host) return;
    const std::lock_guard lock(mutex_);
    count_read(source, part.bytes);
  });
}

std::uint32_t StagedChunks::copy(std::size_t index, std::byte* to) {
  try {
    const std::byte* const staged = lines_.empty() ? nullptr : await(index).data;
    const std::uint32_t sum =
        parts_.copy(index, to, [&](const ChunkParts::Part& part) { return data_of(part, staged); });
    let_go_behind(index);
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
