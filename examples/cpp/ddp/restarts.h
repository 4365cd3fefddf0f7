#pragma once

// Snapshots of a training by libddp::Snapshot, from which the next start of the program goes on.
// What the programs of this folder and of ../fsdp share. All ranks make the same calls.
//
//   Restarts restarts(options, group, net->named_parameters(), *optimizer, Parameters::Alike);
//   for (std::int64_t step = restarts.resume(); step < options.steps; ++step) {
//     train();
//     restarts.save(step + 1);
//   }
//   restarts.close();

#include <ATen/core/Tensor.h>
#include <libddp/libddp.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "options.h"

/// Alike: the same on all ranks. Sharded: each rank has its rows.
enum class Parameters { Alike, Sharded };

class Restarts {
 public:
  /// Without --snapshot-every and --snapshot-storage there are none, and all of it does nothing.
  Restarts(const Options& options, const libddp::Group& group,
           const torch::OrderedDict<std::string, at::Tensor>& parameters,
           torch::optim::Optimizer& optimizer, Parameters kind);

  /// Steps that are done: those of the newest snapshot, which fills parameters and optimizer, or 0.
  std::int64_t resume();
  /// After that many steps, if a snapshot is due. A collective, like resume and close.
  void save(std::int64_t num_steps);
  /// The training has reached its end: nothing stays in memory.
  void close();

 private:
  std::vector<libddp::SnapshotTensor> tensors() const;
  void write_optimizer();
  void read_optimizer();

  std::int64_t every_;
  std::int64_t storage_;
  /// It speaks for all ranks.
  bool is_first_;
  torch::OrderedDict<std::string, at::Tensor> parameters_;
  torch::optim::Optimizer& optimizer_;
  /// Goes before the keys of what this rank alone has.
  std::string own_;
  /// The optimizer as torch::save writes it, behind its size. Its tensors come and go, and shared
  /// ones are whole in there only; a snapshot has tensors of known sizes, so there is room to
  /// spare.
  at::Tensor archive_;
  std::shared_ptr<libddp::Snapshot> snapshot_;
};
