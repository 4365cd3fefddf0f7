// LinkStage's reductions.

#include <utility>
#include <vector>

#include "libddp/collectives/link_stage.h"
#include "libddp/collectives/link_sum.h"

namespace libddp {

void LinkStage::all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                           int num_averaged) {
  const std::size_t element = element_bytes(reduction.dtype);
  if (count * element <= kSmallBytes) return reduce_small(data, count, reduction, num_averaged);
  std::vector<Region> segments = segments_of(data, count, element);
  std::byte* own = segments[static_cast<std::size_t>(host_)].data;
  reduce_large(std::move(segments), own, true, reduction, num_averaged);
}

void LinkStage::all_reduce_prepared(std::byte* data, std::size_t count, const Reduction& reduction,
                                    int num_averaged, Preparation& preparation) {
  const std::size_t element = element_bytes(reduction.dtype);
  if (count * element <= kSmallBytes) {
    return InterStage::all_reduce_prepared(data, count, reduction, num_averaged, preparation);
  }
  std::vector<Region> segments = segments_of(data, count, element);
  std::byte* own = segments[static_cast<std::size_t>(host_)].data;
  reduce_large(std::move(segments), own, true, reduction, num_averaged, &preparation);
}

std::vector<InterStage::Region> LinkStage::segments_of(std::byte* data, std::size_t count,
                                                       std::size_t element) const {
  std::vector<Region> segments;
  for (int host = 0; host < num_hosts(); ++host) {
    const Slice slice = segment_of(count, element, host, num_hosts());
    segments.push_back({data + slice.begin * element, slice.count() * element});
  }
  return segments;
}

void LinkStage::reduce_scatter(const std::vector<Region>& regions, int /*host*/, std::byte* output,
                               const Reduction& reduction, int num_averaged) {
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

void LinkStage::reduce_large(std::vector<Region> segments, std::byte* output, bool spreads,
                             const Reduction& reduction, int divisor, Preparation* preparation) {
  // The ranks of this host have come together before any byte leaves it.
  bool is_preparing = preparation != nullptr && preparation->step();
  barrier();
  const bool is_sum = reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Avg;
  const LinkSum::Job job{
      .segments = std::move(segments),
      .output = output,
      .reduction = reduction,
      .num_averaged = divisor,
      .spreads = spreads,
      .narrows = narrows_floats_ && reduction.dtype == Dtype::Float32 && is_sum,
  };
  LinkPump pump(*this);
  LinkSum sum(pump, peers_, buffers_, host_, job);
  if (is_preparing) sum.hold(preparation->ready());
  while (is_preparing || !pump.is_done()) {
    const bool moved = pump.move();
    const bool computed = sum.compute();
    if (is_preparing) {
      // Nobody waits for the network here: the other ranks of the host wait in the next piece.
      is_preparing = preparation->step();
      sum.hold(preparation->ready());
    } else if (!computed && !moved) {
      pump.wait();
    }
  }
}

}  // namespace libddp
