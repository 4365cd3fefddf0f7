#pragma once

// The bytes of a rank as they are stored, straight from its tensors: one chunk at a time, each with
// a checksum that is made when it is taken. Device tensors are on the host one at a time.
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
  /// Of a tensor, on the host.
  std::span<const std::byte> bytes_of(std::size_t piece) const;

  const PieceLayout layout_;
  const std::vector<at::Tensor> tensors_;
  const std::string name_;
  mutable std::vector<std::uint32_t> sums_;
  /// The last one that was asked for.
  mutable std::size_t on_host_ = 0;
  mutable std::unique_ptr<const HostBytes> host_;
};

}  // namespace libddp
