// The operations derived from others: reduce, gather, scatter, all_gather of lists, all_to_all.
// Blocks travel point to point inside one collective (Backend::exchange); the own block is copied.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>

#include "libddp/group/group_state.h"

namespace libddp {
namespace {

using Direction = Exchange::Direction;

bool have_one_size(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors.front().numel();
  });
}

/// Collects the sends, receives and the own copy of one collective.
class Blocks {
 public:
  explicit Blocks(const GroupIdentity& group) : group_(group) {}

  void send(int rank, const at::Tensor& wire) {
    if (rank == group_.rank) {
      own_input_ = wire;
    } else {
      parts_.push_back({Direction::Send, wire, rank, 0});
    }
  }

  void receive(int rank, const Operand& operand) {
    if (rank == group_.rank) {
      own_output_ = operand.wire;
    } else {
      parts_.push_back({Direction::Recv, operand.wire, rank, 0});
    }
    if (operand.is_copy) targets_.push_back(operand);
  }

  void also_copy_back(const Operand& operand) { targets_.push_back(operand); }

  /// The own copy is made with the others' blocks, so that a failed call changes as little as can
  /// be and an asynchronous one reads its input when it runs.
  WorkPtr launch(Backend& backend, BackendCall call) {
    if (own_input_.defined() && own_output_.defined()) {
      call.on_success = [input = own_input_, output = own_output_] { unpack(input, {output}); };
    }
    copy_back_after(call, targets_);
    return backend.exchange(std::move(call), std::move(parts_));
  }

  /// The same for blocks of one size that lie one after another, on all ranks.
  WorkPtr launch_even(Backend& backend, BackendCall call, const at::Tensor& output,
                      const at::Tensor& input) {
    call.on_success = [from = own_input_, to = own_output_] { unpack(from, {to}); };
    copy_back_after(call, targets_);
    return backend.all_to_all(std::move(call), output, input, std::move(parts_));
  }

 private:
  const GroupIdentity& group_;
  std::vector<Exchange> parts_;
  std::vector<Operand> targets_;
  at::Tensor own_input_;
  at::Tensor own_output_;
};

void check_like(const CallSite& site, const char* list, const std::vector<at::Tensor>& tensors,
                const char* argument, const at::Tensor& tensor) {
  for (const at::Tensor& entry : tensors) {
    check_same_dtype(site, list, entry, argument, tensor);
    check_same_numel(site, list, entry, argument, tensor);
  }
}

}  // namespace

WorkPtr ProcessGroup::reduce(const at::Tensor& tensor, int root, ReduceOptions reduce,
                             CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("reduce");
  check_rank(site, "root", root);
  const bool is_root = root == state.identity.rank;
  const Operand operand =
      make_operand(site, "tensor", tensor, is_root ? Access::ReadWrite : Access::Read);
  check_reduction(site, tensor, reduce.op, reduce.scale);
  BackendCall call = state.call(site, OpKind::Reduce, operand, options);
  call.description.reduce_op = reduce.op;
  call.description.root = root;
  call.results.push_back(tensor);
  if (is_root) {
    if (operand.is_copy) copy_back_after(call, {operand});
    return state.backend->all_reduce(std::move(call), operand.wire, reduce.scale);
  }
  // The other ranks keep their tensors as they are.
  const at::Tensor scratch = state.flat_like(operand.wire, operand.wire.numel());
  pack({operand.wire}, scratch);
  return state.backend->all_reduce(std::move(call), scratch, reduce.scale);
}

WorkPtr ProcessGroup::all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                 CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("all_gather");
  check_list(site, "outputs", outputs);
  const Operand source = make_operand(site, "input", input, Access::Read);
  std::vector<Operand> targets;
  std::vector<at::Tensor> wires;
  std::int64_t numel = 0;
  for (const at::Tensor& output : outputs) {
    targets.push_back(make_operand(site, "outputs", output, Access::Write));
    check_same_dtype(site, "outputs", output, "input", input);
    wires.push_back(targets.back().wire);
    numel += wires.back().numel();
  }
  const auto own = static_cast<std::size_t>(state.identity.rank);
  check_same_numel(site, "outputs[rank]", outputs[own], "input", input);
  BackendCall call = state.call(site, OpKind::AllGather, source.dtype, numel, options);
  call.results = outputs;

  if (!have_one_size(wires)) {
    Blocks blocks(state.identity);
    for (int rank = 0; rank < state.identity.world_size; ++rank) {
      blocks.send(rank, source.wire);
      blocks.receive(rank, targets[static_cast<std::size_t>(rank)]);
    }
    return blocks.launch(*state.backend, std::move(call));
  }
  at::Tensor flat = adjacent_view(wires);
  if (flat.defined()) {
    check_overlap(site, "outputs", flat, "input", source.wire);
  } else {
    flat = state.flat_like(source.wire, numel);
    call.on_success = [flat, wires] { unpack(flat, wires); };
  }
  copy_back_after(call, targets);
  return state.backend->all_gather(std::move(call), flat, source.wire);
}

WorkPtr ProcessGroup::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                             int root, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("gather");
  check_rank(site, "root", root);
  const Operand source = make_operand(site, "input", input, Access::Read);
  BackendCall call = state.call(site, OpKind::Gather, source, options);
  call.description.root = root;
  call.results = outputs;
  Blocks blocks(state.identity);
  blocks.send(root, source.wire);
  if (root == state.identity.rank) {
    check_list(site, "outputs", outputs);
    check_like(site, "outputs", outputs, "input", input);
    for (int rank = 0; rank < state.identity.world_size; ++rank) {
      const at::Tensor& output = outputs[static_cast<std::size_t>(rank)];
      blocks.receive(rank, make_operand(site, "outputs", output, Access::Write));
    }
  } else {
    check_empty_list(site, "outputs", outputs, root);
  }
  return blocks.launch(*state.backend, std::move(call));
}

WorkPtr ProcessGroup::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                              int root, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("scatter");
  check_rank(site, "root", root);
  const Operand target = make_operand(site, "output", output, Access::Write);
  BackendCall call = state.call(site, OpKind::Scatter, target, options);
  call.description.root = root;
  call.results.push_back(output);
  Blocks blocks(state.identity);
  blocks.receive(root, target);
  if (root == state.identity.rank) {
    check_list(site, "inputs", inputs);
    check_like(site, "inputs", inputs, "output", output);
    for (int rank = 0; rank < state.identity.world_size; ++rank) {
      const at::Tensor& input = inputs[static_cast<std::size_t>(rank)];
      blocks.send(rank, make_operand(site, "inputs", input, Access::Read).wire);
    }
  } else {
    check_empty_list(site, "inputs", inputs, root);
  }
  return blocks.launch(*state.backend, std::move(call));
}

WorkPtr ProcessGroup::all_to_all(const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("all_to_all");
  check_list(site, "outputs", outputs);
  check_list(site, "inputs", inputs);
  Blocks blocks(state.identity);
  Dtype dtype = Dtype::UInt8;
  for (int rank = 0; rank < state.identity.world_size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const Operand source = make_operand(site, "inputs", inputs[index], Access::Read);
    const Operand target = make_operand(site, "outputs", outputs[index], Access::Write);
    check_same_dtype(site, "inputs", inputs[index], "inputs[0]", inputs.front());
    check_same_dtype(site, "outputs", outputs[index], "inputs[0]", inputs.front());
    if (rank == state.identity.rank) {
      check_same_numel(site, "outputs[rank]", outputs[index], "inputs[rank]", inputs[index]);
    }
    dtype = source.dtype;
    blocks.send(rank, source.wire);
    blocks.receive(rank, target);
  }
  // Sizes differ from pair to pair: only the kind and the dtype are common.
  BackendCall call = state.call(site, OpKind::AllToAll, dtype, 0, options);
  call.description.num_dims = 0;
  call.results = outputs;
  return blocks.launch(*state.backend, std::move(call));
}

WorkPtr ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                        const std::vector<std::int64_t>& output_splits,
                                        const std::vector<std::int64_t>& input_splits,
                                        CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("all_to_all_single");
  const Operand source = make_operand(site, "input", input, Access::Read);
  const Operand target = make_operand(site, "output", output, Access::Write);
  check_same_dtype(site, "output", output, "input", input);
  const auto receives = check_splits(site, "output", output, output_splits);
  const auto sends = check_splits(site, "input", input, input_splits);
  const auto row_numel = [](const at::Tensor& tensor) {
    return tensor.dim() == 0 || tensor.size(0) == 0 ? 1 : tensor.numel() / tensor.size(0);
  };
  const std::int64_t input_row = row_numel(source.wire);
  const std::int64_t output_row = row_numel(target.wire);
  const auto own = static_cast<std::size_t>(state.identity.rank);
  const at::Tensor flat_input = source.wire.view({-1});
  const at::Tensor flat_output = target.wire.view({-1});
  if (sends[own] * input_row != receives[own] * output_row) {
    site.refuse("this rank's own block differs in size between " + describe("input", input) +
                    " and " + describe("output", output),
                "output_splits[rank] must equal input_splits[rank], and the rows be alike");
  }
  Blocks blocks(state.identity);
  std::int64_t input_begin = 0;
  std::int64_t output_begin = 0;
  for (int rank = 0; rank < state.identity.world_size; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const std::int64_t input_numel = sends[index] * input_row;
    const std::int64_t output_numel = receives[index] * output_row;
    blocks.send(rank, flat_input.narrow(0, input_begin, input_numel));
    Operand block;
    block.wire = flat_output.narrow(0, output_begin, output_numel);
    blocks.receive(rank, block);
    input_begin += input_numel;
    output_begin += output_numel;
  }
  if (target.is_copy) blocks.also_copy_back(target);
  const bool is_even = output_splits.empty() && input_splits.empty();
  // Sizes given by the caller may differ from pair to pair: then only the dtype is common.
  BackendCall call =
      state.call(site, OpKind::AllToAll, source.dtype, is_even ? flat_input.numel() : 0, options);
  if (!is_even) call.description.num_dims = 0;
  call.results.push_back(output);
  return is_even ? blocks.launch_even(*state.backend, std::move(call), flat_output, flat_input)
                 : blocks.launch(*state.backend, std::move(call));
}

}  // namespace libddp
