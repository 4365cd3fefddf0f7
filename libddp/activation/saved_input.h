#pragma once

// An input that a block needs again. Inside another checkpointed block it is one of that block's
// saved tensors: dropped, and made again by the outer replay. Else it is kept.
// Thread rule: one thread at a time.
//
//   SavedInput input(tensor);
//   at::Tensor again = input.unpack([] { return "Block h.3: input 0"; });

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace libddp {

class SavedInput {
 public:
  explicit SavedInput(const at::Tensor& tensor);

  /// The tensor itself. `name` is called for messages only.
  /// Throws CheckpointError: it was changed in place since.
  at::Tensor unpack(const std::function<std::string()>& name) const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
  std::optional<torch::autograd::SavedVariable> packed_;
};

}  // namespace libddp
