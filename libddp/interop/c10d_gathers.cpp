// C10dBackend: all_gather, gather, scatter and their list and coalesced forms.

#include "libddp/interop/c10d_run.h"
#include "libddp/interop/convert.h"
#include "libddp/interop/work_chain.h"

namespace libddp {
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
  return run({c10d::OpType::ALLGATHER, "libddp:all_gather", inputs}, outputs, [&]() -> WorkPtr {
    C10dChecks checks(*group_, "all_gather");
    checks.gathered(outputs, inputs);
    checks.layout(inputs);
    if (inputs.size() == 1) {
      return group_->all_gather(outputs_like(outputs[0], inputs[0]), movable(inputs[0]),
                                call_options(opts.timeout, opts.asyncOp));
    }
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensors parts = outputs_like(every(outputs[0], i, inputs.size()), inputs[i]);
      works.push_back(
          group_->all_gather(parts, movable(inputs[i]), call_options(opts.timeout, true)));
    }
    const TensorLists lists = outputs;
    WorkPtr work = after(all_of(works, {}), {}, [lists] {
      for (std::size_t k = 1; k < lists.size(); ++k) {
        for (std::size_t j = 0; j < lists[k].size(); ++j) {
          at::Tensor(lists[k][j]).copy_(lists[0][j]);
        }
      }
    });
    return settle(std::move(work), opts.asyncOp);
  });
}

C10dBackend::WorkHandle C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions& opts) {
  return run({c10d::OpType::_ALLGATHER_BASE, "libddp:all_gather", {input}}, {{output}}, [&] {
    C10dChecks checks(*group_, "all_gather_into_tensor");
    checks.layout({output, input});
    return group_->all_gather_into(movable(output), movable(input),
                                   call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  return run({c10d::OpType::ALLGATHER_COALESCED, "libddp:all_gather", inputs}, outputs, [&] {
    C10dChecks checks(*group_, "all_gather_coalesced");
    checks.gathered_coalesced(outputs, inputs);
    checks.layout(inputs);
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors parts;
      for (const Tensors& list : outputs) parts.push_back(movable(list[i]));
      works.push_back(
          group_->all_gather(parts, movable(inputs[i]), call_options(opts.timeout, true)));
    }
    return settle(all_of(works, {}), opts.asyncOp);
  });
}

C10dBackend::WorkHandle C10dBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return run({c10d::OpType::COALESCED, "libddp:all_gather", inputs}, {outputs}, [&]() -> WorkPtr {
    C10dChecks checks(*group_, "all_gather_into_tensor_coalesced");
    if (inputs.size() != outputs.size()) {
      checks.fail("requires input/output tensor lists to have the same length");
    }
    checks.layout(inputs);
    checks.layout(outputs);
    if (inputs.empty()) return done("all_gather_into_tensor_coalesced", {});
    std::vector<WorkPtr> works;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(group_->all_gather_into(movable(outputs[i]), movable(inputs[i]),
                                              call_options(opts.timeout, true)));
    }
    return settle(all_of(works, outputs), opts.asyncOp);
  });
}

C10dBackend::WorkHandle C10dBackend::gather(TensorLists& outputs, Tensors& inputs,
                                            const c10d::GatherOptions& opts) {
  return run({c10d::OpType::GATHER, "libddp:gather", inputs}, outputs, [&] {
    C10dChecks checks(*group_, "gather");
    checks.root(opts.rootRank);
    checks.single_input(inputs);
    checks.layout(inputs);
    checks.rooted(outputs, inputs[0], group_->rank() == opts.rootRank, "output");
    const Tensors parts = outputs.empty() ? Tensors() : movable(outputs[0]);
    return group_->gather(parts, movable(inputs[0]), static_cast<int>(opts.rootRank),
                          call_options(opts.timeout, opts.asyncOp));
  });
}

C10dBackend::WorkHandle C10dBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ScatterOptions& opts) {
  return run({c10d::OpType::SCATTER, "libddp:scatter", outputs}, {outputs}, [&] {
    C10dChecks checks(*group_, "scatter");
    checks.root(opts.rootRank);
    checks.single_output(outputs);
    checks.layout(outputs);
    checks.rooted(inputs, outputs[0], group_->rank() == opts.rootRank, "input");
    const Tensors parts = inputs.empty() ? Tensors() : movable(inputs[0]);
    return group_->scatter(movable(outputs[0]), parts, static_cast<int>(opts.rootRank),
                           call_options(opts.timeout, opts.asyncOp));
  });
}

}  // namespace libddp
