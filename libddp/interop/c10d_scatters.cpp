// C10dBackend: reduce_scatter and all_to_all.

#include "libddp/interop/c10d_run.h"
#include "libddp/interop/convert.h"
#include "libddp/interop/work_chain.h"

namespace libddp {
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
  const Tensors recorded = inputs.empty() ? Tensors() : inputs[0];
  return run({c10d::OpType::REDUCE_SCATTER, "libddp:reduce_scatter", recorded}, {outputs}, [&] {
    C10dChecks checks(*group_, "reduce_scatter");
    checks.single_output(outputs);
    if (inputs.size() != 1) checks.fail("requires a single-element input list");
    if (inputs[0].size() != static_cast<std::size_t>(group_->size())) {
      checks.fail("invalid input tensor list size, must be world size");
    }
    checks.layout(outputs);
    checks.layout(inputs[0]);
    Tensors parts;
    for (const at::Tensor& input : inputs[0]) {
      parts.push_back(reduction_input(input, opts.reduceOp));
    }
    return group_->reduce_scatter(outputs[0], parts, {.op = reduce_op(opts.reduceOp)},
                                  call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::ReduceScatterOptions& opts) {
  return run({c10d::OpType::_REDUCE_SCATTER_BASE, "libddp:reduce_scatter", {input}}, {{output}},
             [&] {
               C10dChecks checks(*group_, "reduce_scatter_tensor");
               checks.layout({output, input});
               return group_->reduce_scatter_into(output, reduction_input(input, opts.reduceOp),
                                                  {.op = reduce_op(opts.reduceOp)},
                                                  call_options(opts.timeout, opts.asyncOp));
             });
}

C10dBackend::WorkHandle C10dBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return run({c10d::OpType::COALESCED, "libddp:reduce_scatter", inputs}, {outputs},
             [&]() -> WorkPtr {
               C10dChecks checks(*group_, "reduce_scatter_tensor_coalesced");
               if (inputs.size() != outputs.size()) {
                 checks.fail("requires input/output tensor lists to have the same length");
               }
               checks.layout(inputs);
               checks.layout(outputs);
               if (inputs.empty()) return done("reduce_scatter_tensor_coalesced", {});
               std::vector<WorkPtr> works;
               for (std::size_t i = 0; i < inputs.size(); ++i) {
                 works.push_back(group_->reduce_scatter_into(
                     outputs[i], reduction_input(inputs[i], opts.reduceOp),
                     {.op = reduce_op(opts.reduceOp)}, call_options(opts.timeout, true)));
               }
               WorkPtr work = all_of(works, outputs);
               if (!opts.asyncOp) work->wait();
               return work;
             });
}

C10dBackend::WorkHandle C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<std::int64_t>& output_splits,
                                                   std::vector<std::int64_t>& input_splits,
                                                   const c10d::AllToAllOptions& opts) {
  return run({c10d::OpType::ALLTOALL_BASE, "libddp:all_to_all", {input}}, {{output}}, [&] {
    C10dChecks checks(*group_, "all_to_all_single");
    checks.layout({output, input});
    checks.splits(input_splits, input);
    checks.splits(output_splits, output);
    return group_->all_to_all_single(movable(output), movable(input), output_splits, input_splits,
                                     call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllToAllOptions& opts) {
  return run({c10d::OpType::ALLTOALL, "libddp:all_to_all", inputs}, {outputs}, [&] {
    C10dChecks checks(*group_, "all_to_all");
    checks.one_per_rank(outputs, "output");
    checks.one_per_rank(inputs, "input");
    checks.layout(outputs);
    checks.layout(inputs);
    return group_->all_to_all(movable(outputs), movable(inputs),
                              call_options(opts.timeout, opts.asyncOp));
  });
}

}  // namespace libddp
