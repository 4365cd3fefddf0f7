#pragma once

// float32 memory that travels as bf16: converted piece by piece through the ring of a LinkFlow.
// Thread rule: as the flow's LinkPump.
//
//   BFloat16Send send(pump.add(sockets, {.is_send = true, ..., .ring = n}), floats);
//   while (!pump.is_done()) {
//     send.feed(num_ready);
//     if (!pump.move()) pump.wait();
//   }

#include <cstddef>

#include "libddp/collectives/link_pump.h"

namespace libddp {

/// Floats that are converted at once; a ring holds several pieces, whole.
constexpr std::size_t kBFloat16PieceCount = 32u << 10;

class BFloat16Send {
 public:
  /// `flow`: the bf16 bytes, of which none may move yet.
  BFloat16Send(LinkFlow& flow, const std::byte* floats) : flow_(&flow), floats_(floats) {}

  /// Converts a piece of the first `num_ready` floats (whole pieces, or all), if there is one and
  /// the ring has room.
  bool feed(std::size_t num_ready);

 private:
  LinkFlow* flow_;
  const std::byte* floats_;
};

class BFloat16Receive {
 public:
  BFloat16Receive(LinkFlow& flow, std::byte* floats) : flow_(&flow), floats_(floats) {}

  /// Converts a piece that has come, if there is one.
  bool drain();

 private:
  LinkFlow* flow_;
  std::byte* floats_;
  std::size_t num_done_ = 0;
};

/// Floats of bf16 bytes, and back; either may be any memory, but not the same.
void widen_bfloat16(std::byte* floats, const std::byte* bfloat16, std::size_t count);
/// To nearest even; a NaN stays one.
void narrow_to_bfloat16(std::byte* bfloat16, const std::byte* floats, std::size_t count);

}  // namespace libddp
