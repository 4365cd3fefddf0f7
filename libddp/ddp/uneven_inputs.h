#pragma once

// Ranks with different numbers of batches (torch's join): those that are done take part in the
// others' collectives until all are, with zeros in the place of gradients.
//
// Before each forward all ranks tell each other in one all-gather who has data, whether that
// iteration averages gradients and whether buffers are sent; a rank that is done does the same, and
// what follows from it. In the end all have the model of one that trained to the end.
// Thread rule: that of the model. Everything is a collective of its group.
//
//   UnevenInputs inputs(model.replica(), {});
//   for (auto& batch : mine) { inputs.begin_forward(true, false); ... }
//   inputs.finish(tensors, buffers);

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "libddp/ddp/replicated_model.h"

namespace libddp {

struct JoinOptions {
  /// Gradients are averaged over all ranks, those without data having zeros; else over those that
  /// have data.
  bool divide_by_initial_world_size = true;
  /// StateError on all ranks once the first one is done.
  bool throw_on_early_termination = false;
};

class UnevenInputs {
 public:
  /// Throws StateError where an optimizer shares its work over the ranks: one without data would
  /// not update its part.
  UnevenInputs(ReplicatedModel& model, JoinOptions options);
  /// Later passes average over all ranks.
  ~UnevenInputs();
  UnevenInputs(const UnevenInputs&) = delete;
  UnevenInputs& operator=(const UnevenInputs&) = delete;

  /// A rank with data begins a forward. `synchronises`: its backward pass averages gradients.
  /// Returns the rank that buffers come from, where they are sent.
  int begin_forward(bool synchronises, bool sends_buffers);
  /// This rank has no more data. `tensors`: the whole model; `buffers`: what is sent of it before
  /// forwards.
  void finish(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& buffers);

 private:
  /// What the ranks with data do next.
  struct Iteration {
    int num_active = 0;
    /// The last rank with data, of which the others take buffers; -1 without any.
    int root = -1;
    bool sends_buffers = false;
    bool averages = false;
  };

  Iteration agree(bool is_active, bool synchronises, bool sends_buffers);
  void check_nobody_is_done(const Iteration& iteration) const;

  ReplicatedModel& model_;
  const std::weak_ptr<Reducer> reducer_;
  const JoinOptions options_;
};

}  // namespace libddp
