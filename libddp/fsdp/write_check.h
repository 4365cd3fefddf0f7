#pragma once

// Finds parameters that a forward has written into while they show whole tensors: the ranks of a
// host share these, and elsewhere what is written is lost.
//
// Autograd counts writes, but for those through `.data`. Modules that set parameters from the first
// batch (ActNorm) do it so; hence the bytes are compared too, in the first forward with gradients,
// which trains, and the first one without.
// Thread rule: one thread at a time.
//
//   check.begin(parameters, whole);
//   y = forward(x);
//   if (const auto index = check.find_written(parameters, whole)) refuse(*index);

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "libddp/module/named_tensor.h"

namespace libddp {

class WriteCheck {
 public:
  /// `whole`: what the parameters show now, contiguous and on the CPU.
  void begin(const NamedTensors& parameters, const std::vector<at::Tensor>& whole);
  /// The first that was written into, or shows something else now. Nullopt before begin().
  std::optional<std::size_t> find_written(const NamedTensors& parameters,
                                          const std::vector<at::Tensor>& whole);

 private:
  struct Seen {
    std::int64_t version;
    const void* data;
  };
  std::vector<Seen> seen_;
  /// Of the bytes; empty where they are not compared.
  std::vector<std::uint64_t> sums_;
  /// Whether forwards without gradients, and with them, have been found not to write.
  std::array<bool, 2> are_checked_{};
};

}  // namespace libddp
