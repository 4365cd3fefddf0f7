#pragma once

// A torch::nn::Module and its optimizer in a Snapshot: by names, and whole or sharded, so that a
// training goes on on any number of ranks, with other units, and in Python, where libddp.Snapshot
// loads and saves the same.
//
// Kept are parameters and buffers, each tensor once; state and settings of AdamW, Adam, SGD,
// Adagrad and RMSprop; the numbers that torch's generators draw next; and what the program adds. Of
// sharded units (fully_shard) each rank gives what it owns; parameters of a plain module, or one of
// DistributedDataParallel, are the same on all ranks, and shared out among those of a host. Buffers
// may differ: the first rank's of each host are kept.
// Thread rule: one thread, between steps. save and load are collectives of the snapshot's group;
// `module` and `optimizer` must live as long as this, and be of that group's ranks.
//
//   auto snapshot = libddp::Snapshot::create(group, {.folder = "out/run"});
//   libddp::TrainingState state(net, &optimizer);
//   for (int64_t step = state.load(*snapshot).value_or(0); step < 1000; ++step) {
//     train();
//     state.save(*snapshot, step + 1);
//   }
//   snapshot->close();

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "libddp/snapshot/snapshot.h"

namespace libddp {

class TrainingState {
 public:
  /// `module`: the program's own, also where DistributedDataParallel or fully_shard has it.
  /// `optimizer`: of its parameters; null: the module alone.
  /// Throws ArgumentError without a module, and for an optimizer of another class.
  explicit TrainingState(std::shared_ptr<torch::nn::Module> module,
                         torch::optim::Optimizer* optimizer = nullptr);
  template <typename Module>
  explicit TrainingState(const torch::nn::ModuleHolder<Module>& holder,
                         torch::optim::Optimizer* optimizer = nullptr)
      : TrainingState(
            holder.is_empty() ? nullptr : std::shared_ptr<torch::nn::Module>(holder.ptr()),
            optimizer) {}

  /// `step`: the same on all ranks. `extra`: JSON of this rank. Throws ArgumentError where that is
  /// none, for an optimizer of other parameters, and what Snapshot::save throws.
  Snapshot::Report save(Snapshot& snapshot, std::int64_t step, std::string_view extra = "{}",
                        Storage storage = Storage::Memory);
  /// Loads the newest save that is whole, of a TrainingState or of Python's Snapshot.save(model,
  /// optimizer), and returns its step; without one, nothing, and begins with the memory of the
  /// first save. A save with an optimizer is loaded without one, too. Where the job had fewer
  /// ranks, further ones get what rank 0 had of `extra`. Throws ArgumentError for a save of another
  /// module or optimizer, by name, which has changed nothing; SnapshotError if all saves are
  /// damaged: both may then be filled in part.
  std::optional<std::int64_t> load(Snapshot& snapshot, std::string* extra = nullptr);

 private:
  void take(Snapshot& snapshot, SavedVersion& version, std::string* extra);
  void prepare(Snapshot& snapshot) const;

  const std::shared_ptr<torch::nn::Module> module_;
  torch::optim::Optimizer* const optimizer_;
};

}  // namespace libddp
