#include "libddp/collectives/bfloat16_flow.h"

#include <algorithm>
#include <cstdint>

#include "libddp/kernels/reduce_table.h"

namespace libddp {
namespace {

constexpr std::size_t kWireBytes = sizeof(std::uint16_t);

}  // namespace

void widen_bfloat16(std::byte* floats, const std::byte* bfloat16, std::size_t count) {
  best_kernels().widen(reinterpret_cast<float*>(floats),
                       reinterpret_cast<const std::uint16_t*>(bfloat16), count);
}

void narrow_to_bfloat16(std::byte* bfloat16, const std::byte* floats, std::size_t count) {
  best_kernels().narrow(reinterpret_cast<std::uint16_t*>(bfloat16),
                        reinterpret_cast<const float*>(floats), count);
}

bool BFloat16Send::feed(std::size_t num_ready) {
  const std::size_t at = flow_->open / kWireBytes;
  const std::size_t count = std::min(kBFloat16PieceCount, num_ready - at);
  const std::size_t bytes = count * kWireBytes;
  if (count == 0 || flow_->open + bytes > flow_->done + flow_->ring) return false;
  narrow_to_bfloat16(flow_->data + flow_->open % flow_->ring, floats_ + at * sizeof(float), count);
  flow_->open += bytes;
  return true;
}

bool BFloat16Receive::drain() {
  const std::size_t left = flow_->bytes / kWireBytes - num_done_;
  const std::size_t count = std::min(kBFloat16PieceCount, left);
  const std::size_t begin = num_done_ * kWireBytes;
  if (count == 0 || flow_->done < begin + count * kWireBytes) return false;
  widen_bfloat16(floats_ + num_done_ * sizeof(float), flow_->data + begin % flow_->ring, count);
  num_done_ += count;
  flow_->open = std::min(flow_->bytes, num_done_ * kWireBytes + flow_->ring);
  return true;
}

}  // namespace libddp
