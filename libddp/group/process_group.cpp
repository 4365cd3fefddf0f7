#include "libddp/group/process_group.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "libddp/base/log.h"
#include "libddp/group/all_reduce_each.h"
#include "libddp/group/backend_registry.h"
#include "libddp/group/block_exchange.h"
#include "libddp/group/block_pairs.h"
#include "libddp/group/group_deleter.h"
#include "libddp/group/group_options.h"
#include "libddp/group/group_state.h"
#include "libddp/group/open_groups.h"
#include "libddp/group/own_exchange.h"

namespace libddp {
ProcessGroup::ProcessGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}

Group ProcessGroup::create(c10::intrusive_ptr<c10d::Store> store, Options options) {
  auto state = std::make_unique<State>();
  state->identity = {options.name, options.rank, options.world_size};
  const CallSite site{state->identity, "create"};
  check_options(site, options);
  if (!store) site.refuse("store is null", "pass a c10d::Store that all ranks share");
  state->timeout = options.timeout;
  state->store = std::move(store);
  // Groups of one name but other members (sub-groups side by side) do not meet each other. Ranks of
  // the first group always meet, so that world sizes which differ are told instead of timing out.
  std::string prefix = fmt::format("libddp/{}/", options.name);
  if (options.global_ranks.empty()) {
    options.global_ranks = all_ranks(options.world_size);
  } else {
    const std::string listed = fmt::format("{}", fmt::join(options.global_ranks, ","));
    prefix += fmt::format("{:x}/", std::hash<std::string>{}(listed));
  }
  state->prefix = std::move(prefix);
  state->backend = create_backend(c10::kCPU, {state->store, state->prefix, options});
  state->global_ranks = options.global_ranks;
  state->options = options;
  state->options.look = nullptr;  // for joining alone; it may hold what shall not live as long
  log(LogLevel::Info, "group_created",
      {{"group", options.name},
       {"rank", options.rank},
       {"world_size", options.world_size},
       {"backend", state->backend->name()}});
  return opened(Group(new ProcessGroup(std::move(state)), &delete_as_installed));
}

Group ProcessGroup::over(std::unique_ptr<Backend> backend, Options options) {
  auto state = std::make_unique<State>();
  state->identity = {options.name, options.rank, options.world_size};
  check_options({state->identity, "over"}, options);
  state->timeout = options.timeout;
  state->global_ranks = std::move(options.global_ranks);
  if (state->global_ranks.empty()) state->global_ranks = all_ranks(options.world_size);
  state->backend = std::move(backend);
  return opened(Group(new ProcessGroup(std::move(state)), &delete_as_installed));
}

void ProcessGroup::use_for_devices(std::unique_ptr<Backend> backend) {
  state_->take_device_backend(state_->enter("use_for_devices"), std::move(backend));
}

void ProcessGroup::connect(c10::Device device) {
  const OperationSite site = state_->enter("connect");
  if (device.is_cpu()) return;
  state_->check_moves(site, device);
  state_->backend_for(device).connect(device);
}

bool ProcessGroup::has_device_backend() const { return state_->known_device_backend != nullptr; }

bool ProcessGroup::moves(c10::DeviceType type) const { return state_->moves(type); }

ProcessGroup::~ProcessGroup() {
  // In a forked child: threads, locks and sockets are its parent's, and its own end frees the rest.
  if (state_->made.is_current()) {
    state_->drop();
  } else {
    static_cast<void>(state_.release());
  }
}

int ProcessGroup::rank() const { return state_->identity.rank; }

int ProcessGroup::size() const { return state_->identity.world_size; }

const std::string& ProcessGroup::name() const { return state_->identity.name; }

const std::vector<int>& ProcessGroup::global_ranks() const { return state_->global_ranks; }

std::string ProcessGroup::backend_name() const { return state_->backend->name(); }

std::chrono::milliseconds ProcessGroup::timeout() const { return state_->timeout; }

void ProcessGroup::set_timeout(std::chrono::milliseconds timeout) {
  const CallSite site = state_->enter("set_timeout");
  state_->timeout = check_timeout(site, timeout, timeout);
}

std::uint64_t ProcessGroup::sequence_number() const {
  const Backend* const device = state_->known_device_backend.load();
  return state_->backend->sequence_number() + (device != nullptr ? device->sequence_number() : 0);
}

WorkPtr ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOptions reduce,
                                 CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("all_reduce");
  const Operand operand = make_operand(site, "tensor", tensor, Access::ReadWrite);
  check_reduction(site, tensor, reduce.op, reduce.scale);
  BackendCall call = state.call(site, OpKind::AllReduce, operand, options);
  call.description.reduce_op = reduce.op;
  call.results.push_back(tensor);
  if (operand.is_copy) copy_back_after(call, {operand});
  return state.issue(std::move(call), tensor, &Backend::all_reduce, operand.wire, reduce.scale);
}

WorkPtr ProcessGroup::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                           ReduceOptions reduce, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("all_reduce_coalesced");
  if (tensors.empty()) site.refuse("tensors is empty", "pass one tensor or more");
  if (tensors.size() == 1) return all_reduce(tensors.front(), reduce, options);
  const std::vector<Operand> operands = make_operands(site, "tensors", tensors, Access::ReadWrite);
  check_reduction(site, tensors.front(), reduce.op, reduce.scale);
  BackendCall call =
      state.call(site, OpKind::AllReduce, operands.front().dtype, total_numel(operands), options);
  call.description.reduce_op = reduce.op;
  return state.issue(std::move(call), tensors, [&](Backend& to, BackendCall&& made) {
    return all_reduce_each(to, std::move(made), operands, reduce.scale);
  });
}

WorkPtr ProcessGroup::broadcast(const at::Tensor& tensor, int root, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("broadcast");
  check_rank(site, "root", root);
  const bool is_root = root == state.identity.rank;
  const Operand operand =
      make_operand(site, "tensor", tensor, is_root ? Access::Read : Access::Write);
  BackendCall call = state.call(site, OpKind::Broadcast, operand, options);
  call.description.root = root;
  call.results.push_back(tensor);
  if (operand.is_copy && !is_root) copy_back_after(call, {operand});
  return state.issue(std::move(call), tensor, &Backend::broadcast, operand.wire, root);
}

WorkPtr ProcessGroup::all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                      CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("all_gather_into");
  const Operand source = make_operand(site, "input", input, Access::Read);
  const Operand target = make_operand(site, "output", output, Access::Write);
  check_blocks(site, "output", output, "input", input);
  check_overlap(site, "output", target.wire, "input", source.wire);
  BackendCall call = state.call(site, OpKind::AllGather, source, options);
  call.description.count = static_cast<std::uint64_t>(target.wire.numel());
  call.results.push_back(output);
  if (target.is_copy) copy_back_after(call, {target});
  return state.issue(std::move(call), input, &Backend::all_gather, target.wire, source.wire);
}

WorkPtr ProcessGroup::all_gather_into_coalesced(const std::vector<at::Tensor>& outputs,
                                                const std::vector<at::Tensor>& inputs,
                                                CallOptions options) {
  OperationSite site = state_->enter("all_gather_into_coalesced");
  const BlockPairs pairs(site, "outputs", outputs, Access::Write, "inputs", inputs, Access::Read);
  BackendCall call = state_->call(site, OpKind::AllGather, pairs.dtype(), pairs.numel(), options);
  return state_->issue(std::move(call), inputs, [&](Backend& to, BackendCall&& made) {
    return pairs.gather(to, std::move(made));
  });
}

WorkPtr ProcessGroup::reduce_scatter_into(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOptions reduce, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("reduce_scatter_into");
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
  return state.issue(std::move(call), input, &Backend::reduce_scatter, target.wire, source.wire,
                     reduce.scale);
}

WorkPtr ProcessGroup::reduce_scatter_into_coalesced(const std::vector<at::Tensor>& outputs,
                                                    const std::vector<at::Tensor>& inputs,
                                                    ReduceOptions reduce, CallOptions options) {
  OperationSite site = state_->enter("reduce_scatter_into_coalesced");
  const BlockPairs pairs(site, "inputs", inputs, Access::Read, "outputs", outputs, Access::Write);
  check_reduction(site, outputs.front(), reduce.op, reduce.scale);
  BackendCall call =
      state_->call(site, OpKind::ReduceScatter, pairs.dtype(), pairs.numel(), options);
  call.description.reduce_op = reduce.op;
  return state_->issue(std::move(call), inputs, [&](Backend& to, BackendCall&& made) {
    return pairs.reduce_scatter(to, std::move(made), reduce.scale);
  });
}

WorkPtr ProcessGroup::reduce_scatter(const at::Tensor& output,
                                     const std::vector<at::Tensor>& inputs, ReduceOptions reduce,
                                     CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("reduce_scatter");
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
    return state.issue(std::move(call), inputs, &Backend::reduce_scatter, target.wire, flat,
                       reduce.scale);
  }
  // Uneven blocks: reduce everything and keep the own block.
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < own; ++rank) begin += parts[rank].numel();
  call.on_success = [flat, begin, wire = target.wire] {
    unpack(flat.narrow(0, begin, wire.numel()), {wire});
  };
  copy_back_after(call, {target});
  return state.issue(std::move(call), inputs, &Backend::all_reduce, flat, reduce.scale);
}

WorkPtr ProcessGroup::reduce(const at::Tensor& tensor, int root, ReduceOptions reduce,
                             CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("reduce");
  check_rank(site, "root", root);
  const bool is_root = root == state.identity.rank;
  const Operand operand =
      make_operand(site, "tensor", tensor, is_root ? Access::ReadWrite : Access::Read);
  check_reduction(site, tensor, reduce.op, reduce.scale);
  BackendCall call = state.call(site, OpKind::Reduce, operand, options);
  call.description.reduce_op = reduce.op;
  call.description.root = root;
  call.results.push_back(tensor);
  if (is_root && operand.is_copy) copy_back_after(call, {operand});
  if (state.backend_for(call.device).reduces_to_root()) {
    return state.issue(std::move(call), tensor, &Backend::reduce, operand.wire, root, reduce.scale);
  }
  if (is_root) {
    return state.issue(std::move(call), tensor, &Backend::all_reduce, operand.wire, reduce.scale);
  }
  // The other ranks keep their tensors as they are.
  const at::Tensor scratch = state.flat_like(operand.wire, operand.wire.numel());
  pack({operand.wire}, scratch);
  return state.issue(std::move(call), tensor, &Backend::all_reduce, scratch, reduce.scale);
}

WorkPtr ProcessGroup::all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                 CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("all_gather");
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
    BlockExchange blocks(state.identity);
    for (int rank = 0; rank < state.identity.world_size; ++rank) {
      blocks.send(rank, source.wire);
      blocks.receive(rank, targets[static_cast<std::size_t>(rank)]);
    }
    return state.issue(std::move(call), input, [&](Backend& to, BackendCall&& made) {
      return blocks.launch(to, std::move(made));
    });
  }
  at::Tensor flat = adjacent_view(wires);
  if (flat.defined()) {
    check_overlap(site, "outputs", flat, "input", source.wire);
  } else {
    flat = state.flat_like(source.wire, numel);
    call.on_success = [flat, wires] { unpack(flat, wires); };
  }
  copy_back_after(call, targets);
  return state.issue(std::move(call), input, &Backend::all_gather, flat, source.wire);
}

WorkPtr ProcessGroup::gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                             int root, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("gather");
  check_rank(site, "root", root);
  const Operand source = make_operand(site, "input", input, Access::Read);
  BackendCall call = state.call(site, OpKind::Gather, source, options);
  call.description.root = root;
  call.results = outputs;
  BlockExchange blocks(state.identity);
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
  return state.issue(std::move(call), input, [&](Backend& to, BackendCall&& made) {
    return blocks.launch(to, std::move(made));
  });
}

WorkPtr ProcessGroup::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                              int root, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("scatter");
  check_rank(site, "root", root);
  const Operand target = make_operand(site, "output", output, Access::Write);
  BackendCall call = state.call(site, OpKind::Scatter, target, options);
  call.description.root = root;
  call.results.push_back(output);
  BlockExchange blocks(state.identity);
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
  return state.issue(std::move(call), inputs, [&](Backend& to, BackendCall&& made) {
    return blocks.launch(to, std::move(made));
  });
}

WorkPtr ProcessGroup::all_to_all(const std::vector<at::Tensor>& outputs,
                                 const std::vector<at::Tensor>& inputs, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("all_to_all");
  check_list(site, "outputs", outputs);
  check_list(site, "inputs", inputs);
  BlockExchange blocks(state.identity);
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
  return state.issue(std::move(call), inputs, [&](Backend& to, BackendCall&& made) {
    return blocks.launch(to, std::move(made));
  });
}

WorkPtr ProcessGroup::all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                        const std::vector<std::int64_t>& output_splits,
                                        const std::vector<std::int64_t>& input_splits,
                                        CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("all_to_all_single");
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
  BlockExchange blocks(state.identity);
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
  return state.issue(std::move(call), input, [&](Backend& to, BackendCall&& made) {
    return is_even ? blocks.launch_even(to, std::move(made), flat_output, flat_input)
                   : blocks.launch(to, std::move(made));
  });
}

WorkPtr ProcessGroup::send(const at::Tensor& tensor, int target, int tag, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("send");
  check_peer(site, "target", target);
  check_tag(site, tag);
  const Operand operand = make_operand(site, "tensor", tensor, Access::Read);
  BackendCall call = state.call(site, OpKind::Send, operand, options);
  call.description.root = target;
  call.results.push_back(tensor);
  return state.issue(std::move(call), tensor, &Backend::exchange,
                     std::vector<Exchange>{{Exchange::Direction::Send, operand.wire, target, tag}});
}

WorkPtr ProcessGroup::recv(const at::Tensor& tensor, std::optional<int> source, int tag,
                           CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("recv");
  if (source) {
    check_peer(site, "source", *source);
  } else if (state.identity.world_size == 1) {
    site.refuse("there is no other rank to receive from", "start more ranks");
  }
  check_tag(site, tag);
  const Operand operand = make_operand(site, "tensor", tensor, Access::Write);
  BackendCall call = state.call(site, OpKind::Recv, operand, options);
  call.description.root = source.value_or(-1);
  call.results.push_back(tensor);
  if (operand.is_copy) copy_back_after(call, {operand});
  return state.issue(
      std::move(call), tensor, &Backend::exchange,
      std::vector<Exchange>{{Exchange::Direction::Recv, operand.wire, source.value_or(-1), tag}});
}

WorkPtr ProcessGroup::exchange(std::vector<Exchange> parts, CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("exchange");
  if (parts.empty()) site.refuse("parts is empty", "pass one send or receive or more");
  std::vector<Operand> targets;
  std::vector<at::Tensor> results;
  Dtype dtype = Dtype::UInt8;
  std::int64_t numel = 0;
  bool is_any_send = false;
  for (Exchange& part : parts) {
    const bool is_send = part.direction == Exchange::Direction::Send;
    if (is_send || part.peer != -1) check_rank(site, "peer", part.peer);
    check_tag(site, part.tag);
    Operand operand =
        make_operand(site, "tensor", part.tensor, is_send ? Access::Read : Access::Write);
    results.push_back(part.tensor);
    part.tensor = operand.wire;
    dtype = operand.dtype;
    numel += operand.wire.numel();
    is_any_send = is_any_send || is_send;
    if (!is_send) targets.push_back(std::move(operand));
  }
  auto copies = take_own_parts(site, parts);
  BackendCall call =
      state.call(site, is_any_send ? OpKind::Send : OpKind::Recv, dtype, numel, options);
  call.results = std::move(results);
  if (!copies.empty()) {
    call.on_success = [copies = std::move(copies)] {
      for (const auto& [from, to] : copies) unpack(from, {to});
    };
  }
  copy_back_after(call, targets);
  return state.issue(std::move(call), call.results, &Backend::exchange, std::move(parts));
}

WorkPtr ProcessGroup::barrier(CallOptions options) {
  State& state = *state_;
  OperationSite site = state.enter("barrier");
  site.device = state.device_of_barrier();
  BackendCall call = state.call(site, OpKind::Barrier, Dtype::UInt8, 0, options);
  call.description.num_dims = 0;
  return state.issue(std::move(call), {}, &Backend::barrier);
}

at::Tensor ProcessGroup::allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const OperationSite site = state_->enter("allocate");
  check_sizes(site, sizes);
  if (!device.is_cpu()) state_->check_moves(site, device);
  return state_->backend_for(device).allocate(sizes, dtype, device);
}

at::Tensor ProcessGroup::allocate_shared(at::IntArrayRef sizes, at::ScalarType dtype,
                                         CallOptions options) {
  const OperationSite site = state_->enter("allocate_shared");
  check_sizes(site, sizes);
  if (state_->is_alone()) return state_->backend->allocate(sizes, dtype, c10::kCPU);
  const auto numel = static_cast<std::int64_t>(c10::multiply_integers(sizes));
  BackendCall call = state_->call(site, OpKind::Broadcast, wire_dtype(dtype).value_or(Dtype::UInt8),
                                  numel, options);
  return state_->backend->allocate_shared(std::move(call), sizes, dtype);
}

bool ProcessGroup::is_in_arena(const at::Tensor& tensor) const {
  const bool is_here = tensor.device().is_cpu() || has_device_backend();
  return is_here && state_->backend_for(tensor.device()).is_in_arena(tensor);
}

Group ProcessGroup::split(const std::vector<int>& ranks, const std::string& name) {
  const CallSite site = state_->enter("split");
  check_part(site, ranks);
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return nullptr;
  Options options = state_->options_of_part(ranks, static_cast<int>(own - ranks.begin()), name);
  if (state_->store) return create(state_->store, std::move(options));
  std::unique_ptr<Backend> part =
      state_->backend->split(ranks, {options.name, options.rank, options.world_size});
  if (!part) {
    throw StateError(fmt::format(
        "{} split: a group over {} has no store, or no way, to make a part of it. Hint: make the "
        "smaller group with torch.distributed.new_group and wrap that (from_c10d).",
        state_->identity.where(), backend_name()));
  }
  return over(std::move(part), std::move(options));
}

void ProcessGroup::abort(const std::string& reason) {
  // Also while a shutdown waits for what is in flight: an abort is what ends that.
  if (!state_->made.is_current() || state_->is_closed) state_->refuse_entry("abort");
  state_->backend->abort(reason);
  if (Backend* const device = state_->known_device_backend.load()) device->abort(reason);
}

void ProcessGroup::report_error(const std::string& what) noexcept {
  if (state_->made.is_current() && !state_->is_shut_down) state_->backend->report_error(what);
}

void ProcessGroup::retract_error() noexcept {
  if (state_->made.is_current()) state_->backend->retract_error();
}

void ProcessGroup::waits(std::vector<std::int64_t>& by_rank) const {
  by_rank.assign(static_cast<std::size_t>(size()), 0);
  state_->backend->add_waits(by_rank);
}

std::string ProcessGroup::flight_log() const { return state_->flight_log(); }

std::exception_ptr ProcessGroup::failure() const { return state_->failure(); }

void ProcessGroup::shutdown() {
  if (!state_->made.is_current()) state_->refuse_entry("shutdown");
  state_->shut_down();
}

void ProcessGroup::retire(const std::string& reason) { state_->retire(reason); }

}  // namespace libddp
