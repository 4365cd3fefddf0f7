// C10dBackend: all_reduce, reduce, broadcast.

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "libddp/group/sparse_all_reduce.h"
#include "libddp/interop/c10d_run.h"
#include "libddp/interop/convert.h"
#include "libddp/interop/local_reduce.h"
#include "libddp/interop/work_chain.h"

namespace libddp {
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
  return run({c10d::OpType::ALLREDUCE, "libddp:all_reduce", tensors}, {tensors}, [&]() -> WorkPtr {
    C10dChecks checks(*group_, "all_reduce");
    checks.alike(tensors);
    checks.layout(tensors);
    const ReduceOptions reduce{.op = reduce_op(opts.reduceOp)};
    reduce_into_first(tensors, opts.reduceOp);
    const CallOptions call = call_options(opts.timeout, opts.asyncOp);
    WorkPtr work = group_->all_reduce(tensors[0], reduce, call);
    if (tensors.size() == 1) return work;
    return after(work, tensors, [tensors] { copy_first_to_rest(tensors); });
  });
}

C10dBackend::WorkHandle C10dBackend::allreduce_sparse(Tensors& tensors,
                                                      const c10d::AllreduceOptions& opts) {
  return run({c10d::OpType::_ALLREDUCE_SPARSE, "libddp:all_reduce", {}}, {tensors}, [&] {
    C10dChecks checks(*group_, "all_reduce");
    checks.alike(tensors);
    checks.layout(tensors, /*allow_sparse=*/true);
    if (reduce_op(opts.reduceOp) != ReduceOp::Sum || is_premultiplied(opts.reduceOp)) {
      checks.fail(
          "unsupported reduction operation (allreduce of sparse tensors only works with "
          "ReduceOp.SUM)");
    }
    WorkPtr work = sparse_sum_for(group_, tensors, call_options(opts.timeout, opts.asyncOp));
    if (!opts.asyncOp) work->wait();
    return work;
  });
}

C10dBackend::WorkHandle C10dBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return run({c10d::OpType::ALLREDUCE_COALESCED, "libddp:all_reduce", tensors}, {tensors}, [&] {
    C10dChecks checks(*group_, "all_reduce_coalesced");
    checks.one_type(tensors);
    checks.layout(tensors);
    if (is_premultiplied(opts.reduceOp)) {
      for (const at::Tensor& tensor : tensors) premultiply(opts.reduceOp, tensor);
    }
    return group_->all_reduce_coalesced(tensors, {.op = reduce_op(opts.reduceOp)},
                                        call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return run({c10d::OpType::REDUCE, "libddp:reduce", tensors}, {tensors}, [&] {
    C10dChecks checks(*group_, "reduce");
    checks.root(opts.rootRank);
    checks.root_tensor(opts.rootTensor, tensors);
    checks.single(tensors);
    checks.layout(tensors);
    at::Tensor input = tensors[0];
    if (is_premultiplied(opts.reduceOp)) {
      if (group_->rank() != opts.rootRank)
        input = input.detach().clone();  // only the root's may change
      premultiply(opts.reduceOp, input);
    }
    return group_->reduce(input, static_cast<int>(opts.rootRank), {.op = reduce_op(opts.reduceOp)},
                          call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::broadcast(Tensors& tensors,
                                               const c10d::BroadcastOptions& opts) {
  return run({c10d::OpType::BROADCAST, "libddp:broadcast", tensors}, {tensors}, [&]() -> WorkPtr {
    C10dChecks checks(*group_, "broadcast");
    checks.root(opts.rootRank);
    checks.root_tensor(opts.rootTensor, tensors);
    checks.alike(tensors);
    checks.layout(tensors);
    const at::Tensor source = tensors[static_cast<std::size_t>(opts.rootTensor)];
    WorkPtr work = group_->broadcast(movable(source), static_cast<int>(opts.rootRank),
                                     call_options(opts.timeout, opts.asyncOp));
    if (tensors.size() == 1) return work;
    return after(work, tensors, [source, tensors] {
      for (at::Tensor tensor : tensors) {
        if (!tensor.is_same(source)) tensor.copy_(source);
      }
    });
  });
}

}  // namespace libddp
