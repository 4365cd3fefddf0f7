// ForeignBackend::exchange: blocks as the other library's all-to-all, messages as its send and
// recv.

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "libddp/interop/c10d_reduction.h"
#include "libddp/interop/foreign_state.h"

namespace libddp {
namespace {

bool is_send(const Exchange& part) { return part.direction == Exchange::Direction::Send; }

/// The blocks of one direction, one after another in the order of their ranks.
struct PackedBlocks {
  PackedBlocks(const std::vector<Exchange>& parts, Exchange::Direction direction, int world_size)
      : splits(static_cast<std::size_t>(world_size), 0) {
    std::int64_t total = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      for (const Exchange& part : parts) {
        if (part.direction != direction || part.peer != rank) continue;
        blocks.push_back(part.tensor);
        splits[static_cast<std::size_t>(rank)] += static_cast<std::int64_t>(part.tensor.nbytes());
        total += static_cast<std::int64_t>(part.tensor.nbytes());
      }
    }
    flat = at::empty({total}, at::kByte);
  }

  void fill() const {
    auto* to = static_cast<std::byte*>(flat.data_ptr());
    for (const at::Tensor& block : blocks) {
      if (block.nbytes() > 0) std::memcpy(to, block.const_data_ptr(), block.nbytes());
      to += block.nbytes();
    }
  }

  void spread() const {
    const auto* from = static_cast<const std::byte*>(flat.const_data_ptr());
    for (const at::Tensor& block : blocks) {
      if (block.nbytes() > 0) std::memcpy(block.data_ptr(), from, block.nbytes());
      from += block.nbytes();
    }
  }

  at::Tensor flat;
  std::vector<std::int64_t> splits;
  std::vector<at::Tensor> blocks;
};

}  // namespace

WorkPtr ForeignBackend::exchange(BackendCall call, std::vector<Exchange> parts) {
  const OpKind kind = call.description.kind;
  const bool is_message = kind == OpKind::Send || kind == OpKind::Recv;
  if (is_message) return exchange_messages(std::move(call), parts);
  return exchange_blocks(std::move(call), parts);
}

WorkPtr ForeignBackend::exchange_blocks(BackendCall call, const std::vector<Exchange>& parts) {
  const int world_size = state_->identity.world_size;
  PackedBlocks sends(parts, Exchange::Direction::Send, world_size);
  const auto receives =
      std::make_shared<PackedBlocks>(parts, Exchange::Direction::Recv, world_size);
  sends.fill();
  c10d::AllToAllOptions options;
  options.timeout = call.timeout;
  return start(
      std::move(call), true,
      [&] {
        return Flight{{state_->inner->alltoall_base(receives->flat, sends.flat, receives->splits,
                                                    sends.splits, options)}};
      },
      [receives] { receives->spread(); });
}

// Receives first, so that what comes finds its place.
WorkPtr ForeignBackend::exchange_messages(BackendCall call, const std::vector<Exchange>& parts) {
  return start(
      std::move(call), false,
      [&] {
        Flight flight;
        flight.is_message = true;
        for (const bool sends : {false, true}) {
          for (const Exchange& part : parts) {
            if (is_send(part) != sends) continue;
            std::vector<at::Tensor> wires{bytes_of(part.tensor)};
            if (!sends && flight.source_rank == -2) {
              flight.source_rank = part.peer;
              flight.receive = flight.works.size();
            }
            c10d::Backend& inner = *state_->inner;
            flight.works.push_back(sends            ? inner.send(wires, part.peer, part.tag)
                                   : part.peer >= 0 ? inner.recv(wires, part.peer, part.tag)
                                                    : inner.recvAnysource(wires, part.tag));
          }
        }
        return flight;
      },
      nullptr);
}

}  // namespace libddp
