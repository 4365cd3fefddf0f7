#pragma once

// Copies of the whole tensors of a FlatParameter, for who reads or writes the model between steps.
//
// Thread rule: one thread at a time. Collectives: show, on all ranks of the group, also where some
// show nothing or have no gradients.
//
//   FullCopies copies(spec, memory, accumulated);
//   copies.show({.with_gradients = true});
//   copies.end(/*keep=*/true);          // what the copies were changed to is what this rank owns

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "libddp/fsdp/accumulated_gradients.h"
#include "libddp/fsdp/copy_options.h"
#include "libddp/fsdp/flat_memory.h"
#include "libddp/fsdp/flat_spec.h"

namespace libddp {

class FullCopies {
 public:
  /// All outlive it.
  FullCopies(const FlatSpec& spec, FlatMemory& memory, AccumulatedGradients& accumulated)
      : spec_(spec), memory_(memory), accumulated_(accumulated) {}

  /// Throws StateError where `.grad` shows something else than averages. Before any rank waits.
  void check(const CopyOptions& options) const;
  /// Lets the parameters, which show shards, show copies of the whole tensors, which may be
  /// changed.
  void show(const CopyOptions& options);
  bool are_shown() const { return are_shown_; }
  /// Shards again; `keep` takes what this rank owns of the copies over. Throws StateError where a
  /// copy has another shape then.
  void end(bool keep);

 private:
  std::vector<at::Tensor> whole_parameters();
  std::vector<at::Tensor> whole_gradients() const;
  at::Tensor gather(const at::Tensor& block) const;
  at::Tensor put_together(const at::Tensor& blocks, std::size_t index) const;
  std::string wrong_copy() const;

  const FlatSpec& spec_;
  FlatMemory& memory_;
  AccumulatedGradients& accumulated_;
  bool are_shown_ = false;
};

}  // namespace libddp
