#pragma once

// What an optimizer of LibTorch has by name: the settings of a group and the state of a parameter.
// The names are those of Python's torch.optim, where both have one.
// Thread rule: pure functions; places stay valid as long as what they are of.
//
//   const OptimizerKind& kind = OptimizerKind::of(optimizer);
//   for (const StateField& field : kind.fields(*optimizer.state().at(key))) field.name;

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

namespace libddp {

/// Of a parameter: a count, or a tensor in the parameter's shape, which may be undefined.
struct StateField {
  std::string_view name;
  std::variant<std::int64_t*, at::Tensor*> place;
};

/// Of a group.
struct OptimizerSetting {
  std::string_view name;
  std::variant<double*, bool*, std::tuple<double, double>*> place;
};

struct OptimizerKind {
  /// Throws ArgumentError for one whose state is not known by name: LBFGS, which has some of all
  /// parameters together, and classes of other libraries.
  static const OptimizerKind& of(const torch::optim::Optimizer& optimizer);

  std::string_view name;
  /// Whether weight decay goes past the moments, which Python's Adam has as a setting.
  std::optional<bool> decouples_weight_decay;
  bool (*has)(const torch::optim::OptimizerOptions& options);
  std::vector<OptimizerSetting> (*settings)(torch::optim::OptimizerOptions& options);
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  std::vector<StateField> (*fields)(torch::optim::OptimizerParamState& state);
  /// Tensors that a parameter has after its first step.
  int (*num_moments)(const torch::optim::OptimizerOptions& options);
};

/// Whether it follows gradients instead of going against them, which is no option of LibTorch's.
bool maximizes(const torch::optim::Optimizer& optimizer);

}  // namespace libddp
