#include "libddp/ddp/uneven_inputs.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "libddp/base/error.h"
#include "libddp/ddp/reducer.h"

namespace libddp {
namespace {

/// What each rank says, by place.
enum Vote : std::int64_t { kActive, kSynchronises, kTrains, kSendsBuffers, kNumVotes };

/// In a group that moves no CPU tensors, on the model's device.
at::Tensor where_it_moves(const ReplicatedModel& model, const at::Tensor& tensor) {
  if (model.group()->moves(c10::DeviceType::CPU)) return tensor;
  return tensor.to(model.trained_parameters().front().tensor.device());
}

}  // namespace

UnevenInputs::UnevenInputs(ReplicatedModel& model, JoinOptions options)
    : model_(model), reducer_(model.reducer().weak_from_this()), options_(options) {
  if (model.reducer().is_sharded()) {
    throw StateError(
        "libddp: join: an optimizer shares its work over the ranks of this model, and a rank "
        "without data would not update its part. Hint: leave out AdamW's shard_over, or join.");
  }
}

UnevenInputs::~UnevenInputs() {
  if (const auto reducer = reducer_.lock()) reducer->set_gradient_scale(1.0);
}

int UnevenInputs::begin_forward(bool synchronises, bool sends_buffers) {
  const Iteration iteration = agree(/*is_active=*/true, synchronises, sends_buffers);
  check_nobody_is_done(iteration);
  return iteration.root;
}

void UnevenInputs::finish(const std::vector<at::Tensor>& tensors,
                          const std::vector<at::Tensor>& buffers) {
  bool is_last = true;
  for (;;) {
    const Iteration iteration = agree(/*is_active=*/false, false, false);
    if (iteration.num_active == 0) break;
    check_nobody_is_done(iteration);
    is_last = false;
    if (iteration.sends_buffers) model_.broadcast(buffers, iteration.root);
    if (iteration.averages) model_.reducer().run_empty_pass();
  }
  // Of those that were done last, which have the same model.
  const Iteration last = agree(is_last, false, false);
  model_.broadcast(tensors, last.root);
}

UnevenInputs::Iteration UnevenInputs::agree(bool is_active, bool synchronises, bool sends_buffers) {
  const NamedTensors& parameters = model_.trained_parameters();
  // While all are frozen there is nothing to average.
  const bool trains = synchronises && std::any_of(parameters.begin(), parameters.end(),
                                                  [](const NamedTensor& parameter) {
                                                    return parameter.tensor.requires_grad();
                                                  });
  const at::Tensor own = at::empty({kNumVotes}, at::kLong);
  auto* const said = own.mutable_data_ptr<std::int64_t>();
  said[kActive] = is_active;
  said[kSynchronises] = synchronises;
  said[kTrains] = trains;
  said[kSendsBuffers] = sends_buffers;
  const int size = model_.group()->size();
  const at::Tensor gathered = where_it_moves(model_, at::empty({size, kNumVotes}, at::kLong));
  model_.group()->all_gather_into(gathered, where_it_moves(model_, own), {.label = "join"});
  const at::Tensor all = gathered.cpu();
  Iteration iteration;
  int num_synchronising = 0;
  for (int rank = 0; rank < size; ++rank) {
    const auto* const votes = all.const_data_ptr<std::int64_t>() + rank * kNumVotes;
    iteration.num_active += votes[kActive] != 0 ? 1 : 0;
    num_synchronising += votes[kSynchronises] != 0 ? 1 : 0;
    iteration.averages |= votes[kTrains] != 0;
    iteration.sends_buffers |= votes[kSendsBuffers] != 0;
    if (votes[kActive] != 0) iteration.root = rank;
  }
  // Every rank reduces a part for all, so those that are done need the factor too.
  if (num_synchronising > 0 && !options_.divide_by_initial_world_size) {
    model_.reducer().set_gradient_scale(static_cast<double>(size) / num_synchronising);
  }
  return iteration;
}

void UnevenInputs::check_nobody_is_done(const Iteration& iteration) const {
  const int size = model_.group()->size();
  if (!options_.throw_on_early_termination || iteration.num_active == size) return;
  throw StateError(fmt::format(
      "libddp: join: {} of {} ranks have no more data, and throw_on_early_termination is set. "
      "Hint: end the epoch on all ranks where this is caught.",
      size - iteration.num_active, size));
}

}  // namespace libddp
