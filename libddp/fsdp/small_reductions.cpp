#include "libddp/fsdp/small_reductions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/flat_parameter.h"

namespace libddp {
namespace {

int blocks_of(const FlatGradient& gradient) { return gradient.spec().layout.world_size(); }

/// The group whose ranks hold blocks, or that of the ranks that hold everything.
const Group& group_of(const FlatGradient& gradient) {
  return blocks_of(gradient) > 1 ? gradient.spec().options.shard
                                 : gradient.spec().options.replicate;
}

bool are_alike(const FlatGradient& a, const FlatGradient& b) {
  return a.spec().options.shard == b.spec().options.shard &&
         a.spec().options.replicate == b.spec().options.replicate &&
         a.spec().reduce_dtype == b.spec().reduce_dtype && a.divisor() == b.divisor();
}

/// function(place in the array, place in what travels, bytes) for each block.
template <typename Function>
void for_blocks(const FlatGradient& gradient, std::int64_t from, std::int64_t total, int blocks,
                const Function& function) {
  const auto bytes = [&](std::int64_t numel) {
    return static_cast<std::size_t>(numel) * c10::elementSize(gradient.spec().reduce_dtype);
  };
  const std::int64_t numel = gradient.spec().layout.block_numel();
  for (int block = 0; block < blocks; ++block) {
    function(bytes(block * numel), bytes(block * total + from), bytes(numel));
  }
}

std::byte* begin_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

}  // namespace

bool SmallReductions::takes(const ParamGroup& unit) {
  if (unit.has_reduce_hook()) return false;
  std::size_t bytes = 0;
  for (const auto& flat : unit.flats()) {
    // There a collective is launched by the thread itself, and nothing need be copied for it.
    if (flat->spec().is_on_device()) return false;
    if (flat->gradient().wants_average()) bytes += flat->gradient().num_bytes();
  }
  return bytes <= kMostGroupBytes;
}

void SmallReductions::add(ParamGroup& unit) {
  unit.begin_reduction();
  for (const auto& flat : unit.flats()) {
    FlatGradient& gradient = flat->gradient();
    if (!gradient.wants_average()) continue;
    if (!group_of(gradient)) {
      gradient.end_reduction();
      continue;
    }
    waiting_.push_back(&gradient);
    waiting_bytes_ += gradient.num_bytes();
  }
}

void SmallReductions::start(bool async) {
  collect();
  waiting_bytes_ = 0;
  for (FlatGradient* const gradient : std::exchange(waiting_, {})) {
    Batch& batch = batch_of(*gradient);
    batch.gradients.push_back(gradient);
    batch.block_numel += gradient->spec().layout.block_numel();
  }
  for (Batch& batch : running_) launch(batch, async);
}

SmallReductions::Batch& SmallReductions::batch_of(const FlatGradient& gradient) {
  for (Batch& batch : running_) {
    if (are_alike(*batch.gradients.front(), gradient)) return batch;
  }
  Batch& batch = running_.emplace_back();
  batch.pool = BufferPool::of(group_of(gradient));
  if (std::find(pools_.begin(), pools_.end(), batch.pool) == pools_.end()) {
    pools_.push_back(batch.pool);
  }
  return batch;
}

// Which units they are counts: others may be as large.
std::string SmallReductions::label_of(const Batch& batch) {
  TrainedSet trained;
  std::uint64_t places = 0;
  for (const FlatGradient* const gradient : batch.gradients) {
    trained.add(gradient->averaged());
    places = (places + gradient->spec().place + 1) * 0x9E3779B97F4A7C15u;
  }
  return trained.label(fmt::format("gradients {:06x} of small units {} to {}", places >> 40,
                                   batch.gradients.front()->spec().place >> 16,
                                   batch.gradients.back()->spec().place >> 16));
}

void SmallReductions::launch(Batch& batch, bool async) {
  const FlatGradient& first = *batch.gradients.front();
  const Group& group = group_of(first);
  const int blocks = blocks_of(first);
  batch.sent = batch.pool->take(batch.block_numel * blocks, first.spec().reduce_dtype);
  pack(batch);
  batch.label = label_of(batch);
  const CallOptions options{.async = async, .label = batch.label};
  if (blocks == 1) {
    batch.averages = batch.sent;
    batch.work = group->all_reduce(batch.sent, first.first_reduction(), options);
    return;
  }
  batch.averages = batch.pool->take(batch.block_numel, first.spec().reduce_dtype);
  batch.work =
      group->reduce_scatter_into(batch.averages, batch.sent, first.first_reduction(), options);
}

void SmallReductions::pack(Batch& batch) {
  std::int64_t from = 0;
  for (const FlatGradient* const gradient : batch.gradients) {
    const std::byte* const array = begin_of(gradient->whole());
    for_blocks(*gradient, from, batch.block_numel, blocks_of(*gradient),
               [&](std::size_t in_array, std::size_t in_batch, std::size_t bytes) {
                 std::memcpy(begin_of(batch.sent) + in_batch, array + in_array, bytes);
               });
    from += gradient->spec().layout.block_numel();
  }
}

void SmallReductions::collect() {
  for (Batch& batch : running_) {
    if (!batch.work) continue;  // what failed on its way
    batch.work->wait();
    const FlatGradient& first = *batch.gradients.front();
    if (blocks_of(first) > 1 && first.spec().options.replicate) {
      first.spec().options.replicate->all_reduce(batch.averages, first.second_reduction(),
                                                 {.label = batch.label});
    }
    unpack(batch);
  }
  running_.clear();
}

void SmallReductions::unpack(Batch& batch) {
  std::int64_t from = 0;
  for (FlatGradient* const gradient : batch.gradients) {
    std::byte* const array = begin_of(gradient->average());
    for_blocks(*gradient, from, batch.block_numel, /*blocks=*/1,
               [&](std::size_t in_array, std::size_t in_batch, std::size_t bytes) {
                 std::memcpy(array + in_array, begin_of(batch.averages) + in_batch, bytes);
               });
    gradient->end_reduction();
    from += gradient->spec().layout.block_numel();
  }
  if (!batch.averages.is_same(batch.sent)) batch.pool->give(std::move(batch.averages));
  batch.pool->give(std::move(batch.sent));
}

void SmallReductions::abandon() noexcept {
  waiting_.clear();
  waiting_bytes_ = 0;
  for (Batch& batch : running_) {
    if (!batch.work) continue;
    try {
      batch.work->wait();
    } catch (const std::exception&) {
      batch.work->order_stream();  // the group has failed: the next collective says so
    }
  }
  running_.clear();
}

}  // namespace libddp
