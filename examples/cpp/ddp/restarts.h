#pragma once

// Snapshots of a training, from which the next start of the program goes on, on any number of
// ranks. What the programs of this folder and of ../fsdp share. All ranks make the same calls.
//
//   Restarts restarts(options, group, net.ptr(), *optimizer);
//   for (std::int64_t step = restarts.resume(); step < options.steps; ++step) {
//     train();
//     restarts.save(step + 1);
//   }
//   restarts.close();

#include <libddp/libddp.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>

#include "options.h"

class Restarts {
 public:
  /// Without --snapshot-every and --snapshot-storage there are none, and all of it does nothing.
  Restarts(const Options& options, const libddp::Group& group,
           const std::shared_ptr<torch::nn::Module>& module, torch::optim::Optimizer& optimizer);

  /// Steps that are done: those of the newest snapshot, which fills module and optimizer, or 0.
  std::int64_t resume();
  /// After that many steps, if a snapshot is due. A collective, like resume and close.
  void save(std::int64_t num_steps);
  /// The training has reached its end: nothing stays in memory.
  void close();

 private:
  std::int64_t every_;
  std::int64_t storage_;
  /// It speaks for all ranks.
  bool is_first_;
  libddp::TrainingState state_;
  std::shared_ptr<libddp::Snapshot> snapshot_;
};
