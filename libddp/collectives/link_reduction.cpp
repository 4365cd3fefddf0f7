// LinkStage's reductions.

#include <algorithm>
#include <cstring>
#include <vector>

#include "libddp/collectives/link_stage.h"
#include "libddp/collectives/reduce_kernels.h"

namespace libddp {
namespace {

/// What is reduced at once, and how much a peer may be ahead. A multiple of every element's size.
constexpr std::size_t kPieceBytes = 128u << 10;
constexpr std::size_t kRingBytes = 4 * kPieceBytes;

void reduce_hosts(const Reduction& reduction, int num_averaged,
                  const std::vector<const std::byte*>& sources, std::byte* to, std::size_t count) {
  reduce({.dtype = reduction.dtype,
          .op = reduction.op,
          .count = count,
          .sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .destinations = &to,
          .num_destinations = 1,
          .scale = reduction.scale,
          .num_averaged = num_averaged});
}

}  // namespace

void LinkStage::all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                           int num_averaged) {
  if (count * element_bytes(reduction.dtype) <= kSmallBytes) {
    reduce_small(data, count, reduction, num_averaged);
  } else {
    const std::size_t element = element_bytes(reduction.dtype);
    std::vector<Region> segments;
    for (int host = 0; host < num_hosts(); ++host) {
      const Slice slice = slice_of(count, element, host, num_hosts());
      segments.push_back({data + slice.begin * element, slice.count() * element});
    }
    std::byte* own = segments[static_cast<std::size_t>(host_)].data;
    meet();
    reduce_large(segments, own, true, reduction, num_averaged);
  }
}

void LinkStage::reduce_scatter(const std::vector<Region>& regions, int, std::byte* output,
                               const Reduction& reduction, int num_averaged) {
  meet();
  reduce_large(regions, output, false, reduction, num_averaged);
}

// Everyone reduces everything, in the same order.
void LinkStage::reduce_small(std::byte* data, std::size_t count, const Reduction& reduction,
                             int divisor) {
  const std::size_t bytes = count * element_bytes(reduction.dtype);
  exchange({data, bytes}, std::vector<std::size_t>(peers_.size(), bytes));
  if (count == 0) return;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(num_hosts()), data);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    sources[static_cast<std::size_t>(peers_[i].host)] = payload_of(i);
  }
  reduce_hosts(reduction, divisor, sources, data, count);
}

// NOTE [Results may overwrite]
// The result of a piece comes only after its owner has had this rank's piece, so the bytes that it
// overwrites have left.
void LinkStage::reduce_large(const std::vector<Region>& segments, std::byte* output, bool spreads,
                             const Reduction& reduction, int divisor) {
  const std::size_t element = element_bytes(reduction.dtype);
  const Region own = segments[static_cast<std::size_t>(host_)];
  LinkPump pump(*this);
  std::vector<LinkFlow*> inputs;
  std::vector<LinkFlow*> results;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int peer = static_cast<int>(i);
    const LinkPeer& link = peers_[i];
    const Region theirs = segments[static_cast<std::size_t>(peers_[i].host)];
    rings_[i].resize(kRingBytes);
    inputs.push_back(&pump.add(link.give, {false, peer, rings_[i].data(), own.bytes,
                                           std::min(own.bytes, kRingBytes), 0, kRingBytes}));
    pump.add(link.give, {true, peer, theirs.data, theirs.bytes, theirs.bytes});
    if (!spreads) continue;
    results.push_back(&pump.add(link.result, {true, peer, output, own.bytes, 0}));
    pump.add(link.result, {false, peer, theirs.data, theirs.bytes, theirs.bytes});
  }

  std::size_t reduced = 0;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(num_hosts()));
  const auto reduce_next = [&] {
    const std::size_t bytes = std::min(kPieceBytes, own.bytes - reduced);
    const bool is_there = std::all_of(inputs.begin(), inputs.end(), [&](const LinkFlow* input) {
      return input->done >= reduced + bytes;
    });
    if (bytes == 0 || !is_there) return false;
    sources[static_cast<std::size_t>(host_)] = own.data + reduced;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      sources[static_cast<std::size_t>(peers_[i].host)] = rings_[i].data() + reduced % kRingBytes;
    }
    reduce_hosts(reduction, divisor, sources, output + reduced, bytes / element);
    reduced += bytes;
    for (LinkFlow* input : inputs) input->open = std::min(own.bytes, reduced + kRingBytes);
    for (LinkFlow* result : results) result->open = reduced;
    return true;
  };
  while (!pump.is_done()) {
    bool moved = pump.move();
    while (reduce_next()) moved = true;
    if (!moved) pump.wait();
  }
}

}  // namespace libddp
