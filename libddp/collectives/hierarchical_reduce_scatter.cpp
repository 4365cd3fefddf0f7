// HierarchicalComm::reduce_scatter: the ranks of a host sum every host's blocks among themselves,
// then each host gets its blocks' sums from all others.

#include "libddp/collectives/hierarchical_comm.h"
#include "libddp/collectives/shm_collectives.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {

void HierarchicalComm::reduce_scatter(const CommCall& call, const void* input, void* output,
                                      std::uint64_t output_count, double scale) {
  check_reduction(call, scale);
  const Scatter scatter{static_cast<const std::byte*>(input), static_cast<std::byte*>(output),
                        output_count, output_count * element_bytes(call.description.dtype), scale};
  const auto num_ranks = static_cast<std::uint64_t>(world_size());
  if (scatter.block_bytes * num_ranks <= InterStage::kSmallBytes)
    return scatter_small(call, scatter);
  stage_->begin(call);
  return layout_.is_even() ? scatter_even(call, scatter) : scatter_uneven(call, scatter);
}

// One exchange of everything costs less than the bytes that it saves.
void HierarchicalComm::scatter_small(const CommCall& call, const Scatter& scatter) {
  const auto num_ranks = static_cast<std::uint64_t>(world_size());
  const std::shared_ptr<std::byte> sums = arena_->allocate(scatter.block_bytes * num_ranks);
  copy_bytes(sums.get(), scatter.input, scatter.block_bytes * num_ranks);
  reduce_all(call, sums.get(), scatter.count * num_ranks, scatter.scale);
  copy_bytes(scatter.output, sums.get() + static_cast<std::uint64_t>(rank_) * scatter.block_bytes,
             scatter.block_bytes);
}

// Leader c of a host sums block c of every host; nothing is left to share at the end.
void HierarchicalComm::scatter_even(const CommCall& call, const Scatter& scatter) {
  const Dtype dtype = call.description.dtype;
  const ReduceOp op = call.description.reduce_op;
  const auto num_here = static_cast<std::uint64_t>(layout_.num_leaders());
  const std::shared_ptr<std::byte> ordered = is_host_major() ? nullptr : in_host_order(scatter);
  const std::byte* blocks = ordered ? ordered.get() : scatter.input;
  std::shared_ptr<std::byte> scratch;
  if (num_here > 1) {
    scratch =
        arena_->allocate(scatter.block_bytes * static_cast<std::uint64_t>(layout_.num_hosts()));
  } else {
    local_->barrier(call);  // the call is known; the only rank's blocks are the host's sums
  }
  std::vector<InterStage::Region> regions;
  for (int host = 0; host < layout_.num_hosts(); ++host) {
    const auto number = static_cast<std::uint64_t>(host);
    const std::byte* from = blocks + number * num_here * scatter.block_bytes;
    if (!scratch) {
      // The stage only reads it.
      regions.push_back({const_cast<std::byte*>(from), scatter.block_bytes});
      continue;
    }
    std::byte* to = host == host_ ? scatter.output : scratch.get() + number * scatter.block_bytes;
    local_->reduce_scatter_here(call, dtype, first_op(op), from, to, scatter.count);
    regions.push_back({to, scatter.block_bytes});
  }
  stage_->reduce_scatter(regions, host_, scatter.output, {dtype, op, scatter.scale}, world_size());
}

// The leaders are fewer than the ranks of some hosts: the ranks sum everything, leader c
// exchanges slice c of every host's blocks, the ranks share the slices of their own.
void HierarchicalComm::scatter_uneven(const CommCall& call, const Scatter& scatter) {
  const Dtype dtype = call.description.dtype;
  const ReduceOp op = call.description.reduce_op;
  const std::size_t element = element_bytes(dtype);
  const std::shared_ptr<std::byte> sums = in_host_order(scatter);
  local_->reduce_here(call, dtype, first_op(op), sums.get(),
                      scatter.count * static_cast<std::uint64_t>(world_size()));
  std::vector<InterStage::Region> regions = regions_in(sums.get(), scatter.block_bytes);
  const InterStage::Region own = regions[static_cast<std::size_t>(host_)];
  const auto slice = [&](const InterStage::Region& region, int leader) {
    return slice_of(region.bytes / element, element, leader, layout_.num_leaders());
  };
  if (stage_->is_leader()) {
    for (InterStage::Region& region : regions) {
      const Slice mine = slice(region, index_);
      region = {region.data + mine.begin * element, mine.count() * element};
    }
    stage_->reduce_scatter(regions, host_, regions[static_cast<std::size_t>(host_)].data,
                           {dtype, op, scatter.scale}, world_size());
  }
  std::vector<std::uint64_t> edges{0};
  for (int leader = 0; leader < layout_.num_leaders(); ++leader) {
    edges.push_back(slice(own, leader).end * element);
  }
  local_->share_slices(last_stage(call), own.data, edges);
  copy_bytes(scatter.output, own.data + static_cast<std::uint64_t>(index_) * scatter.block_bytes,
             scatter.block_bytes);
}

// A copy in which the blocks of each host lie together.
std::shared_ptr<std::byte> HierarchicalComm::in_host_order(const Scatter& scatter) const {
  const std::uint64_t bytes = scatter.block_bytes;
  std::shared_ptr<std::byte> ordered =
      arena_->allocate(bytes * static_cast<std::uint64_t>(layout_.host_of.size()));
  std::byte* to = ordered.get();
  for (const std::vector<int>& ranks : layout_.hosts) {
    for (const int rank : ranks) {
      copy_bytes(to, scatter.input + static_cast<std::uint64_t>(rank) * bytes, bytes);
      to += bytes;
    }
  }
  return ordered;
}

}  // namespace libddp
