#pragma once

// What a rank puts into a snapshot of the tensors that it is given, and their bytes on the host.
// Thread rule: values.
//
//   const OwnPieces own(tensors, ranks);
//   const PieceLayout layout = PieceLayout::of(own.pieces());
//   const HostBytes bytes(own.in_order_of(layout));
//   slot.fill(saved, bytes.spans(), values, 1);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
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
  /// The tensor of each piece of a layout that was made of them.
  std::vector<at::Tensor> in_order_of(const PieceLayout& layout) const;

 private:
  void add(const SnapshotTensor& tensor, std::int64_t begin, std::int64_t end);

  std::vector<Piece> pieces_;
  std::vector<at::Tensor> tensors_;
};

/// Tensors as bytes that the CPU reads: their own memory where that is dense, else a copy. Copies
/// of device tensors go side by side into page-locked memory, behind what their current streams
/// have been given; the host waits once.
class HostBytes {
 public:
  explicit HostBytes(std::vector<at::Tensor> tensors);

  std::span<const std::span<const std::byte>> spans() const { return spans_; }

 private:
  std::vector<at::Tensor> kept_;
  std::vector<std::span<const std::byte>> spans_;
};

}  // namespace libddp
