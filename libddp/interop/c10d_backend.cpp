#include "libddp/interop/c10d_backend.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "libddp/group/profiler_event.h"
#include "libddp/group/sparse_all_reduce.h"
#include "libddp/interop/c10d_checks.h"
#include "libddp/interop/c10d_membership.h"
#include "libddp/interop/c10d_reconfigurer.h"
#include "libddp/interop/c10d_run.h"
#include "libddp/interop/convert.h"
#include "libddp/interop/local_reduce.h"
#include "libddp/interop/torch_errors.h"
#include "libddp/interop/work_chain.h"

namespace libddp {

c10::intrusive_ptr<C10dBackend> C10dBackend::create(c10::intrusive_ptr<c10d::Store> store,
                                                    ProcessGroup::Options options) {
  return for_torch([&] {
    Group group = ProcessGroup::create(store, std::move(options));
    return c10::make_intrusive<C10dBackend>(std::move(store), std::move(group));
  });
}

c10::intrusive_ptr<C10dBackend> C10dBackend::create_reconfigurable(
    const c10::intrusive_ptr<c10d::Store>& store, ProcessGroup::Options options) {
  return for_torch([&] {
    return c10::make_intrusive<C10dBackend>(
        std::make_unique<C10dReconfigurer>(std::move(options), store));
  });
}

C10dBackend::C10dBackend(c10::intrusive_ptr<c10d::Store> store, Group group)
    : c10d::Backend(group->rank(), group->size()),
      membership_(std::make_unique<C10dMembership>("")) {
  membership_->set(std::move(store), std::move(group));
}

C10dBackend::C10dBackend(std::unique_ptr<C10dReconfigurer> reconfigurer)
    : c10d::Backend(reconfigurer->options().rank, reconfigurer->options().world_size),
      membership_(std::make_unique<C10dMembership>(C10dReconfigurer::kNobodyYet)),
      reconfigurer_(std::move(reconfigurer)) {}

C10dBackend::~C10dBackend() = default;

Group C10dBackend::group() const { return membership_->group("group"); }

Group C10dBackend::group_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* ours = dynamic_cast<C10dBackend*>(backend.get());
  return ours == nullptr ? nullptr : ours->membership_->find();
}

c10::intrusive_ptr<c10d::Backend::Options> C10dBackend::getBackendOptions() {
  const Group group = membership_->find();
  const auto timeout = group ? group->timeout() : reconfigurer_->timeout();
  auto options = c10::make_intrusive<Options>(kName, timeout);
  options->group_name = group ? group->name() : reconfigurer_->options().name;
  for (int rank : group ? group->global_ranks() : std::vector<int>()) {
    options->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  options->enable_reconfigure = is_reconfigurable();
#endif
  return options;
}

void C10dBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (const Group group = membership_->find()) group->set_timeout(timeout);
  if (reconfigurer_) reconfigurer_->set_timeout(timeout);
}

std::uint64_t C10dBackend::getSequenceNumberForGroup() {
  const Group group = membership_->find();
  return group ? group->sequence_number() : 0;
}

c10d::ErrorType C10dBackend::getError() {
  const Group group = membership_->find();
  const std::exception_ptr failure = group ? group->failure() : nullptr;
  if (!failure) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(failure);
  } catch (const TimeoutError&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const PeerError&) {
    return c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

at::Tensor C10dBackend::allocateTensor(long size, at::TensorOptions options) {
  return for_torch([&] {
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return membership_->group("allocateTensor")->allocate({size}, dtype, options.device());
  });
}

void C10dBackend::eagerConnectSingleDevice(at::Device device) {
  for_torch([&] {
    if (reconfigurer_) reconfigurer_->connect_from_now_on(device);
    if (const Group group = membership_->find()) group->connect(device);
  });
}

c10::intrusive_ptr<c10d::Backend> C10dBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& opts) {
  Group part = for_torch(
      [&] { return membership_->group("split")->split(ranks, opts ? opts->group_name : ""); });
  if (!part) return nullptr;
  if (opts) part->set_timeout(opts->timeout);
  return c10::make_intrusive<C10dBackend>(store, std::move(part));
}

void C10dBackend::abort() {
  const Group group = membership_->find();
  if (!group) return;
  for_torch([&] { group->abort(fmt::format("rank {} called abort()", group->rank())); });
}

void C10dBackend::shutdown() {
  for_torch([&] {
    if (reconfigurer_) reconfigurer_->shut_down();
    if (const Group group = membership_->find()) group->shutdown();
  });
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

void C10dBackend::check_reconfigurable() const {
  if (reconfigurer_) return;
  throw StateError(
      "libddp: the members of this group stay. Hint: pass enable_reconfigure=True to "
      "init_process_group.");
}

c10d::ReconfigureHandle C10dBackend::get_reconfigure_handle() const {
  return for_torch([&] {
    check_reconfigurable();
    return reconfigurer_->handle();
  });
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  for_torch([&] {
    check_reconfigurable();
    reconfigurer_->reconfigure(reconfigure_request(opts), opts.timeout, *membership_);
    const Group group = membership_->group("reconfigure");
    rank_ = group->rank();
    size_ = group->size();
  });
  {
    const std::lock_guard lock(batch_mutex_);
    batch_.reset();  // of the former members
  }
  return run(c10d::OpType::UNKNOWN, {}, [](const Group&) { return done("reconfigure", {}); });
}

#endif

C10dBackend::WorkHandle C10dBackend::barrier(const c10d::BarrierOptions& opts) {
  return run(c10d::OpType::BARRIER, {}, [&](const Group& group) {
    return group->barrier(call_options(opts.timeout, opts.asyncOp));
  });
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // Zero means zero here, as with Gloo: rank 0 looks once who is there.
  for_torch([&] {
    const auto unset = membership_->group("monitored_barrier")->timeout();
    const auto timeout = opts.timeout == c10d::kUnsetTimeout ? unset : opts.timeout;
    membership_->monitored_barrier()->wait(timeout, wait_all_ranks);
  });
}

// C10dBackend: all_reduce, reduce, broadcast.

namespace {

/// Each of `tensors` becomes the coalesced sum of all of them on all ranks.
WorkPtr sparse_sum_for(const Group& group, const Tensors& tensors, const CallOptions& call) {
  at::Tensor input = tensors[0];
  for (std::size_t i = 1; i < tensors.size(); ++i) input = input.add(tensors[i]);
  auto sum = std::make_shared<SparseSum>(group, input);
  WorkPtr entries = followed_by(sum->gather_layouts(call), [group, sum, call] {
    std::vector<Exchange> parts = sum->messages();
    return parts.empty() ? done("all_reduce sparse", {}) : group->exchange(std::move(parts), call);
  });
  return after(entries, tensors, [sum, tensors] {
    const c10::NoGradGuard no_grad;
    const at::Tensor total = sum->add();
    for (const at::Tensor& tensor : tensors) at::Tensor(tensor).copy_(total);
  });
}

}  // namespace

C10dBackend::WorkHandle C10dBackend::allreduce(Tensors& tensors,
                                               const c10d::AllreduceOptions& opts) {
  const bool is_sparse = !tensors.empty() && tensors[0].layout() == at::kSparse;
  if (is_sparse) return allreduce_sparse(tensors, opts);
  return run(c10d::OpType::ALLREDUCE, {tensors}, [&](const Group& group) -> WorkPtr {
    C10dChecks checks(*group, "all_reduce");
    checks.alike(tensors);
    checks.layout(tensors);
    const ReduceOptions reduce{.op = reduce_op(opts.reduceOp)};
    reduce_into_first(tensors, opts.reduceOp);
    const CallOptions call = call_options(opts.timeout, opts.asyncOp);
    WorkPtr work = group->all_reduce(tensors[0], reduce, call);
    note_reduced(opts.reduceOp, tensors);
    if (tensors.size() == 1) return work;
    return after(work, tensors, [tensors] { copy_first_to_rest(tensors); });
  });
}

C10dBackend::WorkHandle C10dBackend::allreduce_sparse(Tensors& tensors,
                                                      const c10d::AllreduceOptions& opts) {
  return run(c10d::OpType::_ALLREDUCE_SPARSE, {tensors}, [&](const Group& group) {
    C10dChecks checks(*group, "all_reduce");
    checks.alike(tensors);
    checks.layout(tensors, /*allow_sparse=*/true);
    if (reduce_op(opts.reduceOp) != ReduceOp::Sum || is_premultiplied(opts.reduceOp)) {
      checks.fail(
          "unsupported reduction operation (allreduce of sparse tensors only works with "
          "ReduceOp.SUM)");
    }
    WorkPtr work = sparse_sum_for(group, tensors, call_options(opts.timeout, opts.asyncOp));
    if (!opts.asyncOp) work->wait();
    return work;
  });
}

C10dBackend::WorkHandle C10dBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return run(c10d::OpType::ALLREDUCE_COALESCED, {tensors}, [&](const Group& group) {
    C10dChecks checks(*group, "all_reduce_coalesced");
    checks.one_type(tensors);
    checks.layout(tensors);
    if (is_premultiplied(opts.reduceOp)) {
      for (const at::Tensor& tensor : tensors) premultiply(opts.reduceOp, tensor);
    }
    return group->all_reduce_coalesced(tensors, {.op = reduce_op(opts.reduceOp)},
                                       call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return run(c10d::OpType::REDUCE, {tensors}, [&](const Group& group) {
    C10dChecks checks(*group, "reduce");
    checks.root(opts.rootRank);
    checks.root_tensor(opts.rootTensor, tensors);
    checks.single(tensors);
    checks.layout(tensors);
    at::Tensor input = tensors[0];
    if (is_premultiplied(opts.reduceOp)) {
      if (group->rank() != opts.rootRank)
        input = input.detach().clone();  // only the root's may change
      premultiply(opts.reduceOp, input);
    }
    WorkPtr work =
        group->reduce(input, static_cast<int>(opts.rootRank), {.op = reduce_op(opts.reduceOp)},
                      call_options(opts.timeout, opts.asyncOp));
    note_reduced(opts.reduceOp, tensors);
    return work;
  });
}

C10dBackend::WorkHandle C10dBackend::broadcast(Tensors& tensors,
                                               const c10d::BroadcastOptions& opts) {
  return run(c10d::OpType::BROADCAST, {tensors}, [&](const Group& group) -> WorkPtr {
    C10dChecks checks(*group, "broadcast");
    checks.root(opts.rootRank);
    checks.root_tensor(opts.rootTensor, tensors);
    checks.alike(tensors);
    checks.layout(tensors);
    const at::Tensor source = tensors[static_cast<std::size_t>(opts.rootTensor)];
    WorkPtr work = group->broadcast(movable(source), static_cast<int>(opts.rootRank),
                                    call_options(opts.timeout, opts.asyncOp));
    if (tensors.size() == 1) return work;
    return after(work, tensors, [source, tensors] {
      for (at::Tensor tensor : tensors) {
        if (!tensor.is_same(source)) tensor.copy_(source);
      }
    });
  });
}

// C10dBackend: all_gather, gather, scatter and their list and coalesced forms.

namespace {

/// Ends the composite before the call returns where the caller asked for that.
WorkPtr settle(WorkPtr work, bool async) {
  if (!async) work->wait();
  return work;
}

/// Views for a gather of one tensor: outputs of equal size take the input's shape.
Tensors outputs_like(const Tensors& outputs, const at::Tensor& input) {
  Tensors views;
  views.reserve(outputs.size());
  for (const at::Tensor& output : outputs) views.push_back(movable(shaped_like(output, input)));
  return views;
}

/// Entries `offset`, `offset + stride`, ... of `list`.
Tensors every(const Tensors& list, std::size_t offset, std::size_t stride) {
  Tensors picked;
  for (std::size_t i = offset; i < list.size(); i += stride) picked.push_back(list[i]);
  return picked;
}

}  // namespace

C10dBackend::WorkHandle C10dBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  return run(c10d::OpType::ALLGATHER, outputs, [&](const Group& group) -> WorkPtr {
    C10dChecks checks(*group, "all_gather");
    checks.gathered(outputs, inputs);
    checks.layout(inputs);
    if (inputs.size() == 1) {
      return group->all_gather(outputs_like(outputs[0], inputs[0]), movable(inputs[0]),
                               call_options(opts.timeout, opts.asyncOp));
    }
    ProfilerEvent event({.kind = OpKind::AllGather}, inputs);
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensors parts = outputs_like(every(outputs[0], i, inputs.size()), inputs[i]);
      works.push_back(
          group->all_gather(parts, movable(inputs[i]), call_options(opts.timeout, true)));
    }
    const TensorLists lists = outputs;
    WorkPtr work = after(all_of(works, {}), {}, [lists] {
      for (std::size_t k = 1; k < lists.size(); ++k) {
        for (std::size_t j = 0; j < lists[k].size(); ++j) {
          at::Tensor(lists[k][j]).copy_(lists[0][j]);
        }
      }
    });
    return event.end_with(settle(std::move(work), opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions& opts) {
  return run(c10d::OpType::_ALLGATHER_BASE, {{output}}, [&](const Group& group) {
    C10dChecks checks(*group, "all_gather_into_tensor");
    checks.layout({output, input});
    return group->all_gather_into(movable(output), movable(input),
                                  call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  return run(c10d::OpType::ALLGATHER_COALESCED, outputs, [&](const Group& group) {
    C10dChecks checks(*group, "all_gather_coalesced");
    checks.gathered_coalesced(outputs, inputs);
    checks.layout(inputs);
    ProfilerEvent event({.kind = OpKind::AllGather}, inputs);
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors parts;
      for (const Tensors& list : outputs) parts.push_back(movable(list[i]));
      works.push_back(
          group->all_gather(parts, movable(inputs[i]), call_options(opts.timeout, true)));
    }
    return event.end_with(settle(all_of(works, {}), opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return run(c10d::OpType::COALESCED, {outputs}, [&](const Group& group) -> WorkPtr {
    C10dChecks checks(*group, "all_gather_into_tensor_coalesced");
    if (inputs.size() != outputs.size()) {
      checks.fail("requires input/output tensor lists to have the same length");
    }
    checks.layout(inputs);
    checks.layout(outputs);
    if (inputs.empty()) return done("all_gather_into_tensor_coalesced", {});
    ProfilerEvent event({.kind = OpKind::AllGather}, inputs);
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(group->all_gather_into(movable(outputs[i]), movable(inputs[i]),
                                             call_options(opts.timeout, true)));
    }
    return event.end_with(settle(all_of(works, outputs), opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::gather(TensorLists& outputs, Tensors& inputs,
                                            const c10d::GatherOptions& opts) {
  return run(c10d::OpType::GATHER, outputs, [&](const Group& group) {
    C10dChecks checks(*group, "gather");
    checks.root(opts.rootRank);
    checks.single_input(inputs);
    checks.layout(inputs);
    checks.rooted(outputs, inputs[0], group->rank() == opts.rootRank, "output");
    const Tensors parts = outputs.empty() ? Tensors() : movable(outputs[0]);
    return group->gather(parts, movable(inputs[0]), static_cast<int>(opts.rootRank),
                         call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ScatterOptions& opts) {
  return run(c10d::OpType::SCATTER, {outputs}, [&](const Group& group) {
    C10dChecks checks(*group, "scatter");
    checks.root(opts.rootRank);
    checks.single_output(outputs);
    checks.layout(outputs);
    checks.rooted(inputs, outputs[0], group->rank() == opts.rootRank, "input");
    const Tensors parts = inputs.empty() ? Tensors() : movable(inputs[0]);
    return group->scatter(movable(outputs[0]), parts, static_cast<int>(opts.rootRank),
                          call_options(opts.timeout, opts.asyncOp));
  });
}

// C10dBackend: reduce_scatter and all_to_all.

namespace {

/// The input of a reduction that must not change: a multiplied copy for PREMUL_SUM, else itself.
at::Tensor reduction_input(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!is_premultiplied(op)) return tensor;
  at::Tensor copy = tensor.detach().clone();
  premultiply(op, copy);
  return copy;
}

}  // namespace

C10dBackend::WorkHandle C10dBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  return run(c10d::OpType::REDUCE_SCATTER, {outputs}, [&](const Group& group) {
    C10dChecks checks(*group, "reduce_scatter");
    checks.single_output(outputs);
    if (inputs.size() != 1) checks.fail("requires a single-element input list");
    if (inputs[0].size() != static_cast<std::size_t>(group->size())) {
      checks.fail("invalid input tensor list size, must be world size");
    }
    checks.layout(outputs);
    checks.layout(inputs[0]);
    Tensors parts;
    for (const at::Tensor& input : inputs[0]) {
      parts.push_back(reduction_input(input, opts.reduceOp));
    }
    return group->reduce_scatter(outputs[0], parts, {.op = reduce_op(opts.reduceOp)},
                                 call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::ReduceScatterOptions& opts) {
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, {{output}}, [&](const Group& group) {
    C10dChecks checks(*group, "reduce_scatter_tensor");
    checks.layout({output, input});
    return group->reduce_scatter_into(output, reduction_input(input, opts.reduceOp),
                                      {.op = reduce_op(opts.reduceOp)},
                                      call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return run(c10d::OpType::COALESCED, {outputs}, [&](const Group& group) -> WorkPtr {
    C10dChecks checks(*group, "reduce_scatter_tensor_coalesced");
    if (inputs.size() != outputs.size()) {
      checks.fail("requires input/output tensor lists to have the same length");
    }
    checks.layout(inputs);
    checks.layout(outputs);
    if (inputs.empty()) return done("reduce_scatter_tensor_coalesced", {});
    ProfilerEvent event({.kind = OpKind::ReduceScatter}, inputs);
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(group->reduce_scatter_into(
          outputs[i], reduction_input(inputs[i], opts.reduceOp), {.op = reduce_op(opts.reduceOp)},
          call_options(opts.timeout, true)));
    }
    return event.end_with(settle(all_of(works, outputs), opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<std::int64_t>& output_splits,
                                                   std::vector<std::int64_t>& input_splits,
                                                   const c10d::AllToAllOptions& opts) {
  return run(c10d::OpType::ALLTOALL_BASE, {{output}}, [&](const Group& group) {
    C10dChecks checks(*group, "all_to_all_single");
    checks.layout({output, input});
    checks.splits(input_splits, input);
    checks.splits(output_splits, output);
    return group->all_to_all_single(movable(output), movable(input), output_splits, input_splits,
                                    call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllToAllOptions& opts) {
  return run(c10d::OpType::ALLTOALL, {outputs}, [&](const Group& group) {
    C10dChecks checks(*group, "all_to_all");
    checks.one_per_rank(outputs, "output");
    checks.one_per_rank(inputs, "input");
    checks.layout(outputs);
    checks.layout(inputs);
    return group->all_to_all(movable(outputs), movable(inputs),
                             call_options(opts.timeout, opts.asyncOp));
  });
}

// C10dBackend: send, recv and the batches of batch_isend_irecv.

namespace {

constexpr int kAnySource = -1;

c10d::OpType type_of(Exchange::Direction direction, int peer) {
  if (direction == Exchange::Direction::Send) return c10d::OpType::SEND;
  return peer == kAnySource ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
}

}  // namespace

C10dBackend::WorkHandle C10dBackend::exchange_one(Tensors& tensors, Exchange::Direction direction,
                                                  int peer, int tag) {
  const bool is_send = direction == Exchange::Direction::Send;
  return run(type_of(direction, peer), {tensors}, [&](const Group& group) -> WorkPtr {
    C10dChecks checks(*group, is_send ? "send" : "recv");
    if (tensors.size() != 1) checks.fail("takes a single tensor");
    checks.layout(tensors);
    const at::Tensor view = movable(tensors[0]);
    {
      std::lock_guard lock(batch_mutex_);
      if (batch_) {
        batch_->parts.push_back({direction, view, peer, tag});
        return done("part of a batch", {});  // endCoalescing's work is the one to wait for
      }
    }
    const CallOptions call = call_options(c10d::kUnsetTimeout, true);
    if (is_send) return group->send(view, peer, tag, call);
    const auto source = peer == kAnySource ? std::nullopt : std::optional<int>(peer);
    return group->recv(view, source, tag, call);
  });
}

C10dBackend::WorkHandle C10dBackend::send(Tensors& tensors, int target, int tag) {
  return exchange_one(tensors, Exchange::Direction::Send, target, tag);
}

C10dBackend::WorkHandle C10dBackend::recv(Tensors& tensors, int source, int tag) {
  return exchange_one(tensors, Exchange::Direction::Recv, source, tag);
}

C10dBackend::WorkHandle C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  return exchange_one(tensors, Exchange::Direction::Recv, kAnySource, tag);
}

void C10dBackend::startCoalescing() {
  std::lock_guard lock(batch_mutex_);
  if (batch_) {
    for_torch([&] {
      C10dChecks(*membership_->group("startCoalescing"), "startCoalescing")
          .fail("a batch is open already");
    });
  }
  batch_.emplace();
}

void C10dBackend::drop_batch() {
  std::lock_guard lock(batch_mutex_);
  batch_.reset();
}

C10dBackend::WorkHandle C10dBackend::endCoalescing() {
  std::optional<Batch> batch;
  {
    std::lock_guard lock(batch_mutex_);
    batch.swap(batch_);
  }
  return run(c10d::OpType::COALESCED, {}, [&](const Group& group) -> WorkPtr {
    if (!batch) C10dChecks(*group, "endCoalescing").fail("no batch is open");
    std::vector<WorkPtr> works = std::move(batch->works);
    if (!batch->parts.empty()) {
      works.push_back(
          group->exchange(std::move(batch->parts), call_options(c10d::kUnsetTimeout, true)));
    }
    if (works.empty()) return done("coalesced", {});
    return works.size() == 1 ? works[0] : all_of(works, {});
  });
}

}  // namespace libddp
