#include "libddp/collectives/hierarchical_comm.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "libddp/collectives/shm_collectives.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {
namespace {

/// The last stage waits a little longer than the one between hosts, which knows who is missing.
constexpr std::chrono::milliseconds kNetworkFirst{1000};
/// From here on the pieces of a reduction are many enough to overlap.
constexpr std::uint64_t kManyPiecesBytes = 1u << 20;

}  // namespace

HierarchicalComm::HierarchicalComm(HierarchicalCommOptions options)
    : rank_(options.rank),
      layout_(std::move(options.layout)),
      host_(layout_.host(rank_)),
      index_(layout_.index(rank_)),
      arena_(std::move(options.arena)),
      local_(std::move(options.local)),
      stage_(std::make_unique<LinkStage>(*local_, host_, std::move(options.leaders),
                                         options.link.wire_dtype == Dtype::BFloat16)),
      links_(*local_, std::move(options.message_peers)),
      mailbox_(*this, {&local_->messages(), &links_}) {
  if (!options.make_stage || !stage_->is_leader()) return;
  stage_ = options.make_stage(*local_, {host_, layout_.num_hosts(), index_}, std::move(stage_));
}

std::string HierarchicalComm::last_call_of(int rank) const {
  if (layout_.is_local(rank, rank_)) return local_->last_call_of(rank);
  return stage_->last_call_of(rank).value_or("one that this host has not seen");
}

CommCall HierarchicalComm::last_stage(const CommCall& call) {
  CommCall later = call;
  if (later.timeout) *later.timeout += kNetworkFirst;
  return later;
}

std::optional<std::uint64_t> HierarchicalComm::last_sequence_of(int rank) const {
  if (!layout_.is_local(rank, rank_)) return std::nullopt;
  return local_->last_sequence_of(rank);
}

std::optional<GroupFailure> HierarchicalComm::look_at_network(std::int64_t now_ns) {
  if (auto failure = stage_->look_at_network(now_ns)) return failure;
  return links_.look_at_network(now_ns);
}

std::optional<std::uint64_t> HierarchicalComm::beats_of(int rank) const {
  return layout_.is_local(rank, rank_) ? local_->beats_of(rank) : std::nullopt;
}

// Small payloads go whole: through every leader if that makes the last stage needless.
bool HierarchicalComm::carries(std::uint64_t bytes) const {
  const bool is_small = bytes <= InterStage::kSmallBytes;
  return stage_->is_leader() && (!is_small || layout_.is_even() || index_ == 0);
}

std::vector<std::uint64_t> HierarchicalComm::slice_edges(std::uint64_t count,
                                                         std::size_t element) const {
  const std::uint64_t bytes = count * element;
  if (bytes <= InterStage::kSmallBytes) return {0, bytes};
  std::vector<std::uint64_t> edges{0};
  const int num_leaders = layout_.num_leaders();
  for (int leader = 0; leader < num_leaders; ++leader) {
    edges.push_back(slice_of(count, element, leader, num_leaders).end * element);
  }
  return edges;
}

// The last stage: what the leaders of this host have, all its ranks get.
void HierarchicalComm::share(const CommCall& call, std::byte* data, std::uint64_t count,
                             std::size_t element) {
  if (count * element <= InterStage::kSmallBytes && layout_.is_even()) return;
  local_->share_slices(last_stage(call), data, slice_edges(count, element));
}

void HierarchicalComm::all_reduce(const CommCall& call, void* data, double scale) {
  reduce_all(call, static_cast<std::byte*>(data), call.description.count, scale);
}

void HierarchicalComm::reduce_all(const CommCall& call, std::byte* data, std::uint64_t count,
                                  double scale) {
  check_reduction(call, scale);
  const Dtype dtype = call.description.dtype;
  const ReduceOp op = call.description.reduce_op;
  const std::size_t element = element_bytes(dtype);
  const std::uint64_t bytes = count * element;
  if (pays_in_pieces(bytes)) return reduce_in_pieces(call, data, count, scale);
  stage_->begin(call);
  local_->reduce_here(call, dtype, first_op(op), data, count);
  if (carries(bytes)) {
    std::uint64_t begin = 0;
    std::uint64_t end = bytes;
    if (bytes > InterStage::kSmallBytes) {
      const std::vector<std::uint64_t> edges = slice_edges(count, element);
      begin = edges[static_cast<std::size_t>(index_)];
      end = edges[static_cast<std::size_t>(index_) + 1];
    }
    stage_->all_reduce(data + begin, (end - begin) / element, {dtype, op, scale}, world_size());
  }
  share(call, data, count, element);
}

// Every rank of this host is a leader, so that its own slice is all that it needs. Each host
// decides for itself.
bool HierarchicalComm::pays_in_pieces(std::uint64_t bytes) const {
  const int num_here = static_cast<int>(layout_.ranks_of(host_).size());
  return bytes >= kManyPiecesBytes && num_here > 1 && num_here == layout_.num_leaders();
}

// What the ranks of this host have reduced leaves while they reduce the next piece: the segments of
// the other hosts first, which this host gives away.
void HierarchicalComm::reduce_in_pieces(const CommCall& call, std::byte* data, std::uint64_t count,
                                        double scale) {
  const Dtype dtype = call.description.dtype;
  const ReduceOp op = call.description.reduce_op;
  const std::size_t element = element_bytes(dtype);
  const std::vector<std::uint64_t> edges = slice_edges(count, element);
  std::vector<std::uint64_t> starts;
  for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
    const std::uint64_t slice_count = (edges[i + 1] - edges[i]) / element;
    const Slice own = InterStage::segment_of(slice_count, element, host_, layout_.num_hosts());
    starts.push_back(own.end * element);
  }
  stage_->begin(call);
  const std::unique_ptr<Preparation> pieces =
      local_->reduce_slices_here(call, dtype, first_op(op), data, edges, std::move(starts));
  const std::uint64_t begin = edges[static_cast<std::size_t>(index_)];
  const std::uint64_t end = edges[static_cast<std::size_t>(index_) + 1];
  stage_->all_reduce_prepared(data + begin, (end - begin) / element, {dtype, op, scale},
                              world_size(), *pieces);
  share(call, data, count, element);
}

// The blocks of each host lie together in the order of the group's ranks.
bool HierarchicalComm::is_host_major() const {
  int next = 0;
  for (const std::vector<int>& ranks : layout_.hosts) {
    for (const int rank : ranks) {
      if (rank != next++) return false;
    }
  }
  return true;
}

std::vector<InterStage::Region> HierarchicalComm::regions_in(std::byte* data,
                                                             std::uint64_t block_bytes) const {
  std::vector<InterStage::Region> regions;
  for (const std::vector<int>& ranks : layout_.hosts) {
    const std::uint64_t bytes = block_bytes * ranks.size();
    regions.push_back({data, bytes});
    data += bytes;
  }
  return regions;
}

void HierarchicalComm::all_gather(const CommCall& call, const void* input, void* output,
                                  std::uint64_t input_bytes) {
  auto* to = static_cast<std::byte*>(output);
  stage_->begin(call);
  std::shared_ptr<std::byte> scratch;
  if (!is_host_major()) {
    scratch = arena_->allocate(input_bytes * static_cast<std::uint64_t>(world_size()));
  }
  const auto regions = regions_in(scratch ? scratch.get() : to, input_bytes);
  local_->all_gather(call, input, regions[static_cast<std::size_t>(host_)].data, input_bytes);
  gather_regions(call, regions);
  if (!scratch) return;
  for (int rank = 0; rank < world_size(); ++rank) {
    const std::byte* region = regions[static_cast<std::size_t>(layout_.host(rank))].data;
    copy_bytes(to + static_cast<std::uint64_t>(rank) * input_bytes,
               region + static_cast<std::uint64_t>(layout_.index(rank)) * input_bytes, input_bytes);
  }
}

void HierarchicalComm::gather_regions(const CommCall& call,
                                      const std::vector<InterStage::Region>& regions) {
  std::uint64_t largest = 0;
  for (const InterStage::Region& region : regions) {
    largest = std::max<std::uint64_t>(largest, region.bytes);
  }
  const bool is_small = largest <= InterStage::kSmallBytes;
  if (carries(largest)) {
    std::vector<InterStage::Region> slices = regions;
    if (!is_small) {
      for (InterStage::Region& slice : slices) {
        const Slice part = slice_of(slice.bytes, 1, index_, layout_.num_leaders());
        slice = {slice.data + part.begin, part.count()};
      }
    }
    stage_->all_gather(slices);
  }
  if (is_small && layout_.is_even()) return;
  for (int host = 0; host < layout_.num_hosts(); ++host) {
    if (host == host_) continue;
    const InterStage::Region& region = regions[static_cast<std::size_t>(host)];
    std::vector<std::uint64_t> edges{0, region.bytes};
    if (!is_small) {
      edges = {0};
      for (int leader = 0; leader < layout_.num_leaders(); ++leader) {
        edges.push_back(slice_of(region.bytes, 1, leader, layout_.num_leaders()).end);
      }
    }
    local_->share_slices(last_stage(call), region.data, edges);
  }
}

void HierarchicalComm::broadcast(const CommCall& call, void* data, std::uint64_t bytes, int root) {
  auto* to = static_cast<std::byte*>(data);
  const int root_host = layout_.host(root);
  stage_->begin(call);
  if (host_ == root_host) {
    local_->broadcast(call, data, bytes, layout_.index(root));
  } else if (bytes <= InterStage::kSmallBytes && layout_.is_even()) {
    // There is no last stage in which the ranks of this host would see that one of them called
    // something else, such as another root.
    local_->barrier(call);
  }
  if (carries(bytes)) {
    const Slice slice = bytes <= InterStage::kSmallBytes
                            ? Slice{0, bytes}
                            : slice_of(bytes, 1, index_, layout_.num_leaders());
    stage_->broadcast(to + slice.begin, slice.count(), root_host);
  }
  // Here too: a rank whose host called something else must not find out later than the others.
  if (host_ != root_host) share(call, to, bytes, 1);
}

void HierarchicalComm::barrier(const CommCall& call) {
  stage_->begin(call);
  local_->barrier(call);
  if (stage_->is_leader() && (index_ == 0 || layout_.is_even())) stage_->barrier();
  if (!layout_.is_even()) local_->meet_again(last_stage(call));
}

// HierarchicalComm::reduce_scatter: the ranks of a host sum every host's blocks among themselves,
// then each host gets its blocks' sums from all others.

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
