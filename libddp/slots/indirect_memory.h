#pragma once

// Memory that the CPU cannot write, that of a device: bytes come to it by way of places on the
// host, each as large as a chunk. Thread rule: any thread; a place belongs to the thread that took
// it.
//
//   std::byte* const place = memory.take_place();
//   std::memcpy(place + 16, bytes, 8);
//   memory.send(place, pieces);       // {{.at = 16, .to = parameter, .bytes = 8}}
//   memory.give_back(place);

#include <cstddef>
#include <cstdint>
#include <span>

namespace libddp {

class IndirectMemory {
 public:
  struct Piece {
    /// In the place.
    std::uint64_t at = 0;
    std::byte* to = nullptr;
    std::uint64_t bytes = 0;
  };

  virtual ~IndirectMemory() = default;

  /// Whether an address lies in it.
  virtual bool has(const std::byte* to) const = 0;
  /// Waits until there is one.
  virtual std::byte* take_place() = 0;
  /// Begins to copy; the bytes stay in the place until it is taken again.
  virtual void send(std::byte* place, std::span<const Piece> pieces) = 0;
  virtual void give_back(std::byte* place) noexcept = 0;
};

}  // namespace libddp
