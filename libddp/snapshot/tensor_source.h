#pragma once

// The bytes of a rank as they are stored, straight from its tensors: one chunk at a time, each with
// a checksum that is made when it is taken.
// Thread rule: one thread, which takes each chunk ahead of its checksum.
//
//   const TensorSource source(own, /*rank=*/0, /*step=*/700);
//   folder.add_rank(saved, start, 0, 2, source, values);

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libddp/slots/chunk_source.h"
#include "libddp/snapshot/own_pieces.h"
#include "libddp/snapshot/staged_chunks.h"

namespace libddp {

class TensorSource final : public ChunkSource {
 public:
  TensorSource(const OwnPieces& own, int rank, std::int64_t step);

  const PieceLayout& layout() const override { return layout_; }
  std::uint32_t checksum(std::size_t index) const override { return sums_.at(index); }
  std::span<const std::byte> chunk(std::size_t index,
                                   std::vector<std::byte>& scratch) const override;
  std::string name() const override { return name_; }

 private:
  const PieceLayout layout_;
  const std::vector<at::Tensor> tensors_;
  const std::string name_;
  mutable std::vector<std::uint32_t> sums_;
  /// From the chunk on that was asked for first, or out of their order.
  mutable std::unique_ptr<StagedChunks> chunks_;
  mutable std::size_t next_ = 0;
};

}  // namespace libddp
