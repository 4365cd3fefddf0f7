#pragma once

// The memory of device tensors that are loaded into, for scatter(): chunks come to it beside each
// other through a few places of page-locked memory (device_lines.h), so that a load needs no memory
// of the host's that grows with the model.
// Thread rule: as IndirectMemory; `add`, `begin` and `finish` by one thread, whose current streams
// count.
//
//   StagedTargets memory;
//   std::byte* const to = memory.add(parameter);
//   memory.begin();
//   scatter(source, {{.offset = 0, .bytes = 4096, .to = to}}, 2, &memory);
//   memory.finish();

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "libddp/slots/indirect_memory.h"
#include "libddp/snapshot/device_lines.h"

namespace libddp {

class StagedTargets final : public IndirectMemory {
 public:
  /// The address of a dense tensor's bytes; null where it has none.
  std::byte* add(const at::Tensor& tensor);
  /// What is sent from now on comes behind what the current streams have been given.
  void begin();
  /// The host waits until all is there. Throws what the devices throw.
  void finish() { lines_.wait_for_all(); }

  bool has(const std::byte* to) const override { return find(to) != nullptr; }
  std::byte* take_place() override;
  void send(std::byte* place, std::span<const Piece> pieces) override;
  void give_back(std::byte* place) noexcept override;

 private:
  using Place = DeviceLines::Place;
  /// Memory of one tensor, or of several that overlap.
  struct Target {
    std::vector<at::Tensor> kept;
    at::Tensor bytes;
    std::size_t line = 0;
  };

  /// Null for addresses of the host.
  const Target* find(const std::byte* to) const;
  Place& place_at(const std::byte* data);

  /// By address.
  std::map<std::uintptr_t, Target> targets_;
  /// A deque: places do not move.
  std::deque<Place> places_;
  DeviceLines lines_;
  /// Of places and of who uses the lines.
  std::mutex mutex_;
  std::condition_variable changed_;
  /// Those that nobody has taken, the one that was given back first in front.
  std::deque<std::byte*> idle_;
};

}  // namespace libddp
