#include "libddp/group/block_pairs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <utility>

#include "libddp/group/validation.h"

namespace libddp {

BlockPairs::BlockPairs(OperationSite& site, const char* whole_argument,
                       const std::vector<at::Tensor>& wholes, Access whole_access,
                       const char* block_argument, const std::vector<at::Tensor>& blocks,
                       Access block_access)
    : world_size_(site.group.world_size) {
  if (wholes.empty() || wholes.size() != blocks.size()) {
    site.refuse(fmt::format("{} has {} tensors and {} {}", whole_argument, wholes.size(),
                            block_argument, blocks.size()),
                "pass one tensor or more, and as many in one list as in the other");
  }
  wholes_ = make_operands(site, whole_argument, wholes, whole_access);
  blocks_ = make_operands(site, block_argument, blocks, block_access);
  for (std::size_t i = 0; i < wholes.size(); ++i) {
    check_blocks(site, whole_argument, wholes[i], block_argument, blocks[i]);
    check_overlap(site, whole_argument, wholes_[i].wire, block_argument, blocks_[i].wire);
  }
}

std::vector<BlockPair> BlockPairs::pairs() const {
  std::vector<BlockPair> pairs;
  for (std::size_t i = 0; i < wholes_.size(); ++i) {
    pairs.push_back({wholes_[i].wire, blocks_[i].wire});
  }
  return pairs;
}

std::vector<at::Tensor> BlockPairs::places_in(const at::Tensor& packed) const {
  const at::Tensor rows = packed.view({world_size_, -1});
  std::vector<at::Tensor> places;
  std::int64_t begin = 0;
  for (const Operand& block : blocks_) {
    places.push_back(rows.narrow(1, begin, block.wire.numel()));
    begin += block.wire.numel();
  }
  return places;
}

std::vector<at::Tensor> BlockPairs::whole_rows() const {
  std::vector<at::Tensor> rows;
  for (const Operand& whole : wholes_) {
    rows.push_back(whole.wire.view({world_size_, whole.wire.numel() / world_size_}));
  }
  return rows;
}

WorkPtr BlockPairs::gather(Backend& to, BackendCall call) const {
  for (const Operand& whole : wholes_) call.results.push_back(whole.user);
  if (ListBackend* const lists = to.lists()) {
    copy_back_after(call, wholes_);
    return lists->all_gather_each(std::move(call), pairs());
  }
  const at::AutoDispatchBelowADInplaceOrView quiet;
  const at::Tensor& like = wholes_.front().wire;
  const at::Tensor packed = to.allocate({numel()}, like.scalar_type(), like.device());
  const at::Tensor own = to.allocate({numel() / world_size_}, like.scalar_type(), like.device());
  pack(wires(blocks_), own);
  call.on_success = [places = places_in(packed), rows = whole_rows()] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].copy_(places[i]);
  };
  copy_back_after(call, wholes_);
  return to.all_gather(std::move(call), packed, own);
}

WorkPtr BlockPairs::reduce_scatter(Backend& to, BackendCall call, double scale) const {
  for (const Operand& block : blocks_) call.results.push_back(block.user);
  if (ListBackend* const lists = to.lists()) {
    copy_back_after(call, blocks_);
    return lists->reduce_scatter_each(std::move(call), pairs(), scale);
  }
  const at::AutoDispatchBelowADInplaceOrView quiet;
  const at::Tensor& like = wholes_.front().wire;
  const at::Tensor packed = to.allocate({numel()}, like.scalar_type(), like.device());
  const at::Tensor own = to.allocate({numel() / world_size_}, like.scalar_type(), like.device());
  const std::vector<at::Tensor> places = places_in(packed);
  const std::vector<at::Tensor> rows = whole_rows();
  for (std::size_t i = 0; i < rows.size(); ++i) places[i].copy_(rows[i]);
  call.on_success = [own, parts = wires(blocks_)] { unpack(own, parts); };
  copy_back_after(call, blocks_);
  return to.reduce_scatter(std::move(call), own, packed, scale);
}

}  // namespace libddp
