#pragma once

// Autograd's count of what was written into a parameter that shows now its whole tensor, now this
// rank's part: one count for each.
//
// NOTE [Versions]
// Where an operation needs a parameter in the backward pass (a scale, a norm's weight), autograd
// keeps the parameter itself, a leaf, and computes with what it shows when the pass comes there. A
// pass that begins where no hook of ours sees it would compute with a part: an error of shapes, or,
// where the part has one row, wrong numbers without a word. With counts of their own, autograd
// finds that what it has kept is not there any more and refuses. Views of the whole tensor, which
// have its count and its memory, are not concerned.
// Thread rule: one thread at a time.
//
//   TwoVersions versions;
//   versions.show_shard(weight);  // with the data
//   versions.show_whole(weight);

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace libddp {

class TwoVersions {
 public:
  /// `parameter` shows its whole tensor; nothing where it does so already.
  void show_whole(const at::Tensor& parameter);
  /// `parameter` shows this rank's part; nothing where it does so already.
  void show_shard(const at::Tensor& parameter);

 private:
  c10::VariableVersion whole_;
  c10::VariableVersion shard_;
  /// Writes into the part that the count of the whole tensor has taken over.
  std::uint32_t seen_ = 0;
  bool shows_shard_ = false;
};

}  // namespace libddp
