// The operations that a backend has itself: all_reduce, broadcast, all_gather_into,
// reduce_scatter_into, barrier, and those that differ from one of them only by packing.

#include <algorithm>
#include <utility>

#include "libddp/group/group_state.h"

namespace libddp {
namespace {

std::vector<Operand> make_operands(const CallSite& site, const char* argument,
                                   const std::vector<at::Tensor>& tensors, Access access) {
  std::vector<Operand> operands;
  operands.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    operands.push_back(make_operand(site, argument, tensor, access));
    check_same_dtype(site, argument, tensor, argument, tensors.front());
  }
  return operands;
}

std::vector<at::Tensor> wires(const std::vector<Operand>& operands) {
  std::vector<at::Tensor> result;
  result.reserve(operands.size());
  for (const Operand& operand : operands) result.push_back(operand.wire);
  return result;
}

std::int64_t total_numel(const std::vector<Operand>& operands) {
  std::int64_t numel = 0;
  for (const Operand& operand : operands) numel += operand.wire.numel();
  return numel;
}

}  // namespace

WorkPtr ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOptions reduce,
                                 CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("all_reduce");
  const Operand operand = make_operand(site, "tensor", tensor, Access::ReadWrite);
  check_reduction(site, tensor, reduce.op, reduce.scale);
  BackendCall call = state.call(site, OpKind::AllReduce, operand, options);
  call.description.reduce_op = reduce.op;
  call.results.push_back(tensor);
  if (operand.is_copy) copy_back_after(call, {operand});
  return state.backend->all_reduce(std::move(call), operand.wire, reduce.scale);
}

WorkPtr ProcessGroup::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                           ReduceOptions reduce, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("all_reduce_coalesced");
  if (tensors.empty()) site.refuse("tensors is empty", "pass one tensor or more");
  if (tensors.size() == 1) return all_reduce(tensors.front(), reduce, options);
  const std::vector<Operand> operands = make_operands(site, "tensors", tensors, Access::ReadWrite);
  check_reduction(site, tensors.front(), reduce.op, reduce.scale);
  const std::vector<at::Tensor> parts = wires(operands);
  const std::int64_t numel = total_numel(operands);
  BackendCall call = state.call(site, OpKind::AllReduce, operands.front().dtype, numel, options);
  call.description.reduce_op = reduce.op;
  call.results = tensors;
  at::Tensor flat = adjacent_view(parts);
  if (!flat.defined()) {
    flat = state.flat_like(parts.front(), numel);
    pack(parts, flat);
    call.on_success = [flat, parts] { unpack(flat, parts); };
  }
  copy_back_after(call, operands);
  return state.backend->all_reduce(std::move(call), flat, reduce.scale);
}

WorkPtr ProcessGroup::broadcast(const at::Tensor& tensor, int root, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("broadcast");
  check_rank(site, "root", root);
  const bool is_root = root == state.identity.rank;
  const Operand operand =
      make_operand(site, "tensor", tensor, is_root ? Access::Read : Access::Write);
  BackendCall call = state.call(site, OpKind::Broadcast, operand, options);
  call.description.root = root;
  call.results.push_back(tensor);
  if (operand.is_copy && !is_root) copy_back_after(call, {operand});
  return state.backend->broadcast(std::move(call), operand.wire, root);
}

WorkPtr ProcessGroup::all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                      CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("all_gather_into");
  const Operand source = make_operand(site, "input", input, Access::Read);
  const Operand target = make_operand(site, "output", output, Access::Write);
  check_blocks(site, "output", output, "input", input);
  check_overlap(site, "output", target.wire, "input", source.wire);
  BackendCall call = state.call(site, OpKind::AllGather, source, options);
  call.description.count = static_cast<std::uint64_t>(target.wire.numel());
  call.results.push_back(output);
  if (target.is_copy) copy_back_after(call, {target});
  return state.backend->all_gather(std::move(call), target.wire, source.wire);
}

WorkPtr ProcessGroup::reduce_scatter_into(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOptions reduce, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("reduce_scatter_into");
  const Operand source = make_operand(site, "input", input, Access::Read);
  const Operand target = make_operand(site, "output", output, Access::Write);
  check_blocks(site, "input", input, "output", output);
  check_overlap(site, "input", source.wire, "output", target.wire);
  check_reduction(site, output, reduce.op, reduce.scale);
  BackendCall call = state.call(site, OpKind::ReduceScatter, target, options);
  call.description.count = static_cast<std::uint64_t>(source.wire.numel());
  call.description.reduce_op = reduce.op;
  call.results.push_back(output);
  if (target.is_copy) copy_back_after(call, {target});
  return state.backend->reduce_scatter(std::move(call), target.wire, source.wire, reduce.scale);
}

WorkPtr ProcessGroup::reduce_scatter(const at::Tensor& output,
                                     const std::vector<at::Tensor>& inputs, ReduceOptions reduce,
                                     CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("reduce_scatter");
  check_list(site, "inputs", inputs);
  const std::vector<Operand> sources = make_operands(site, "inputs", inputs, Access::Read);
  const Operand target = make_operand(site, "output", output, Access::Write);
  const auto own = static_cast<std::size_t>(state.identity.rank);
  check_same_dtype(site, "output", output, "inputs", inputs.front());
  check_same_numel(site, "output", output, "inputs[rank]", inputs[own]);
  check_reduction(site, output, reduce.op, reduce.scale);

  const std::vector<at::Tensor> parts = wires(sources);
  const std::int64_t numel = total_numel(sources);
  const at::Tensor flat = state.flat_like(target.wire, numel);
  pack(parts, flat);
  BackendCall call = state.call(site, OpKind::ReduceScatter, target.dtype, numel, options);
  call.description.reduce_op = reduce.op;
  call.results.push_back(output);
  const bool is_even = std::all_of(parts.begin(), parts.end(), [&](const at::Tensor& part) {
    return part.numel() == parts.front().numel();
  });
  if (is_even) {
    if (target.is_copy) copy_back_after(call, {target});
    return state.backend->reduce_scatter(std::move(call), target.wire, flat, reduce.scale);
  }
  // Uneven blocks: reduce everything and keep the own block.
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < own; ++rank) begin += parts[rank].numel();
  call.on_success = [flat, begin, wire = target.wire] {
    unpack(flat.narrow(0, begin, wire.numel()), {wire});
  };
  copy_back_after(call, {target});
  return state.backend->all_reduce(std::move(call), flat, reduce.scale);
}

WorkPtr ProcessGroup::barrier(CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("barrier");
  BackendCall call = state.call(site, OpKind::Barrier, Dtype::UInt8, 0, options);
  call.description.num_dims = 0;
  return state.backend->barrier(std::move(call));
}

}  // namespace libddp
