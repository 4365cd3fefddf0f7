#pragma once

// The state of an optimizer of LibTorch by the names of its parameters: tensors for a snapshot, and
// values as libddp.Snapshot has them in Python, so that each loads what the other has saved.
// Thread rule: one thread; not while a step runs. Collective: the construction, where an AdamW
// shares its work over several hosts or devices.
//
//   const OptimizerState state(optimizer, parts);
//   state.tensors();   // "optimizer.state.head.weight.exp_avg", ...
//   state.values();    // {"groups": [{"lr": 0.001, "params": ["head.weight"]}], ...}

#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "libddp/snapshot/snapshot_tensor.h"
#include "libddp/training/module_parts.h"
#include "libddp/training/optimizer_kind.h"

namespace libddp {

class OptimizerState {
 public:
  /// `parts`: of the module whose parameters it has. Throws ArgumentError for parameters of another
  /// one, for a state that has not its parameter's shape, and what OptimizerKind::of throws.
  OptimizerState(torch::optim::Optimizer& optimizer, const ModuleParts& parts);

  const std::vector<SnapshotTensor>& tensors() const { return tensors_; }
  const nlohmann::json& values() const { return values_; }

  /// Before the keys of all its tensors.
  static constexpr std::string_view kPrefix = "optimizer.state.";
  static std::string key(const std::string& parameter, std::string_view field);
  /// A tensor of the parameter's shape, as the snapshot has it.
  static SnapshotTensor moment(std::string key, at::Tensor tensor, const ModulePart& part);
  /// What the parameters of a group are of the module, each once. Throws ArgumentError for one of
  /// another.
  static std::vector<const ModulePart*> parts_of(const torch::optim::OptimizerParamGroup& group,
                                                 const ModuleParts& parts);

 private:
  void add(const ModulePart& part, torch::optim::OptimizerParamState& state);

  const OptimizerKind& kind_;
  std::vector<SnapshotTensor> tensors_;
  nlohmann::json values_;
};

}  // namespace libddp
