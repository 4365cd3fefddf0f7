#pragma once

// Parameters that compute in a lower precision than they are kept in, for mixed-precision training
// of a whole model without autocast.
//
// `lower` copies every floating-point parameter into low-precision memory (kept from step to step)
// and lets the parameter itself show it: the same object, so modules, optimizers and saved graphs
// need not know. `raise` shows the full precision again. A graph recorded in between refers to the
// parameters themselves, so they stay low until its backward pass has ended.
// Thread rule: one thread at a time, not while a forward or a backward pass runs.
//
//   LowPrecisionParameters parameters(all_parameters, at::kBFloat16);
//   parameters.lower();    // before forward
//   ...
//   parameters.raise();    // after backward, before optimizer.step()

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "libddp/module/named_tensor.h"

namespace libddp {

class LowPrecisionParameters {
 public:
  /// `dtype`: half or bfloat16; ArgumentError otherwise. Parameters of it or of no floating-point
  /// dtype are left alone.
  LowPrecisionParameters(const NamedTensors& parameters, at::ScalarType dtype);

  /// Called after each change: autograd gives a parameter of another dtype another node.
  void on_change(std::function<void()> callback) { on_change_ = std::move(callback); }

  /// Returns whether it did anything: they may be low already.
  bool lower();
  void raise();
  bool is_low() const { return is_low_; }
  at::ScalarType dtype() const { return dtype_; }

 private:
  const at::ScalarType dtype_;
  std::function<void()> on_change_;
  bool is_low_ = false;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> low_;
  /// What the parameters show when they are not low.
  std::vector<at::Tensor> full_;
};

}  // namespace libddp
