#include "libddp/snapshot/device_lines.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>

#include "libddp/base/first_line.h"
#include "libddp/base/log.h"
#include "libddp/slots/chunk_source.h"

namespace libddp {

DeviceLines::~DeviceLines() {
  try {
    wait_for_all();
  } catch (const std::exception&) {
    // Whoever uses the device next is told.
    log(LogLevel::Debug, "snapshot_stream_failed",
        {{"error", first_line_of(std::current_exception())}});
  }
}

std::size_t DeviceLines::line_to(c10::Device device) {
  const auto known = std::find_if(streams_.begin(), streams_.end(), [&](const c10::Stream& stream) {
    return stream.device() == device;
  });
  if (known != streams_.end()) return static_cast<std::size_t>(known - streams_.begin());
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStreamFromGlobalPool(device);
  c10::Event given(device.type());
  given.record(guard.getStream(device));
  given.block(stream);
  streams_.push_back(stream);
  return streams_.size() - 1;
}

DeviceLines::Place DeviceLines::make_place() const {
  Place place;
  const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  place.memory = at::empty({static_cast<std::int64_t>(kChunkBytes)}, pinned);
  place.data = static_cast<std::byte*>(place.memory.mutable_data_ptr());
  for (const c10::Stream& stream : streams_) place.copied.emplace_back(stream.device_type());
  return place;
}

void DeviceLines::record(Place& place) const {
  for (std::size_t i = 0; i < streams_.size(); ++i) place.copied[i].record(streams_[i]);
}

void DeviceLines::wait(const Place& place) {
  for (const c10::Event& event : place.copied) event.synchronize();
}

void DeviceLines::wait_for_all() const {
  for (const c10::Stream& stream : streams_) {
    c10::impl::VirtualGuardImpl(stream.device_type()).synchronizeStream(stream);
  }
}

at::Tensor DeviceLines::bytes_at(std::uintptr_t address, std::size_t size, c10::Device device) {
  const std::int64_t sizes[] = {static_cast<std::int64_t>(size)};
  return at::for_blob(reinterpret_cast<void*>(address), sizes)
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace libddp
