#pragma once

// What a rank puts into a snapshot of the tensors that it is given.
// Thread rule: values.
//
//   const OwnPieces own(tensors, ranks);
//   const PieceLayout layout = PieceLayout::of(own.pieces());
//   StagedChunks chunks(own.in_order_of(layout));

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "libddp/slots/piece_layout.h"
#include "libddp/snapshot/job_ranks.h"
#include "libddp/snapshot/snapshot_tensor.h"

namespace libddp {

class OwnPieces {
 public:
  /// Throws ArgumentError (SnapshotTensor::check).
  OwnPieces(const std::vector<SnapshotTensor>& tensors, const JobRanks& ranks);

  const std::vector<Piece>& pieces() const { return pieces_; }
  /// What the ranks of a host store together must be alike on them, or nobody has some part of it.
  /// A collective; throws ArgumentError on all ranks that names the first difference.
  void check_alike(const JobRanks& ranks) const;
  /// The tensor of each piece of a layout that was made of them.
  std::vector<at::Tensor> in_order_of(const PieceLayout& layout) const;

 private:
  void add(const SnapshotTensor& tensor, std::int64_t begin, std::int64_t end);

  std::vector<Piece> pieces_;
  std::vector<at::Tensor> tensors_;
  /// Of StoredBy::HostTogether, by key: a line for each, as errors have it.
  std::vector<std::string> together_;
};

}  // namespace libddp
