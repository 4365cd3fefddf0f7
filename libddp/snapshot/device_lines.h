#pragma once

// Copies between devices and the host beside a training: a stream of each device, which waits for
// what the current stream had been given by then, and places of page-locked memory, a chunk each,
// for what is on its way. Thread rule: `line_to` by one thread, whose current streams count; copies
// by one at a time.
//
//   DeviceLines lines;
//   const std::size_t line = lines.line_to(tensor.device());
//   DeviceLines::Place place = lines.make_place();
//   { const c10::StreamGuard beside(lines.stream(line)); place.memory.copy_(bytes, true); }
//   lines.record(place);
//   DeviceLines::wait(place);       // the host does

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace libddp {

class DeviceLines {
 public:
  struct Place {
    /// Bytes of a chunk.
    at::Tensor memory;
    std::byte* data = nullptr;
    /// Of what was copied last, one of each line.
    std::vector<c10::Event> copied;
  };
  /// Enough for chunks to be on their way while others are copied by each of a dozen threads.
  static constexpr std::size_t kPlaces = 16;

  DeviceLines() = default;
  /// Waits for what is on its way, well or not.
  ~DeviceLines();
  DeviceLines(const DeviceLines&) = delete;
  DeviceLines& operator=(const DeviceLines&) = delete;

  /// Number of the line of a device; the first call for a device begins it.
  std::size_t line_to(c10::Device device);
  bool empty() const { return streams_.empty(); }
  const c10::Stream& stream(std::size_t line) const { return streams_[line]; }
  /// REQUIRES that all lines are there.
  Place make_place() const;
  /// What has been given to the lines by now is what wait() waits for.
  void record(Place& place) const;
  static void wait(const Place& place);
  /// The host waits for all lines. Throws what the devices throw.
  void wait_for_all() const;

  /// Memory of somebody else's as a tensor of bytes.
  static at::Tensor bytes_at(std::uintptr_t address, std::size_t size, c10::Device device);

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace libddp
