#pragma once

// Where the state of an optimizer that a snapshot has goes: memory for it, and its taking over once
// that is filled. Thread rule: one thread; not while a step runs.
//
//   OptimizerTargets targets(optimizer, parts, version.pieces(), values);   // nothing is changed
//   snapshot.read(version, targets.tensors());
//   targets.install();

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "libddp/slots/piece.h"
#include "libddp/snapshot/snapshot_tensor.h"
#include "libddp/training/module_parts.h"
#include "libddp/training/optimizer_kind.h"

namespace libddp {

class OptimizerTargets {
 public:
  using Pieces = std::map<std::string, Piece>;

  /// `values`: OptimizerState's, or what Python has saved. Throws ArgumentError where the state is
  /// of other parameters, groups or another kind of optimizer.
  OptimizerTargets(torch::optim::Optimizer& optimizer, const ModuleParts& parts,
                   const Pieces& stored, const nlohmann::json& values);

  /// Memory of the optimizer where it has a tensor that fits; else fresh one.
  const std::vector<SnapshotTensor>& tensors() const { return tensors_; }
  /// Settings, counts and tensors become the optimizer's; parameters that had no state have none.
  void install();

 private:
  struct Count {
    std::int64_t* place;
    at::Tensor stored;
  };
  struct Entry {
    void* key;
    std::unique_ptr<torch::optim::OptimizerParamState> state;
  };

  void add_group(std::size_t index, const ModuleParts& parts, const nlohmann::json& values);
  bool has_state(const ModulePart& part) const;
  void add_state(const ModulePart& part);
  void add_tensor(const ModulePart& part, const Piece& piece, const StateField& field,
                  const at::Tensor& own);
  void check_all_taken() const;

  torch::optim::Optimizer& optimizer_;
  const OptimizerKind& kind_;
  /// Those of optimizers.
  Pieces stored_;
  std::vector<std::function<void()>> settings_;
  std::vector<Entry> entries_;
  std::vector<Count> counts_;
  std::vector<SnapshotTensor> tensors_;
};

}  // namespace libddp
