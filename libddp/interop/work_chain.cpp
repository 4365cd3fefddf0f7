#include "libddp/interop/work_chain.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <memory>
#include <mutex>
#include <utility>

namespace libddp {
namespace {

/// What the parts of one all_of share.
struct Join {
  explicit Join(std::size_t parts, WorkPtr outer) : left(parts), outer(std::move(outer)) {}

  void part_done(Work& part) {
    {
      std::lock_guard lock(mutex);
      if (!error) error = part.exception();
      if (--left > 0) return;
    }
    outer->finish(error);
  }

  std::mutex mutex;
  std::size_t left;
  std::exception_ptr error;
  WorkPtr outer;
};

}  // namespace

WorkPtr after(const WorkPtr& first, std::vector<at::Tensor> tensors, std::function<void()> then) {
  auto outer = std::make_shared<Work>(first->description(), std::move(tensors));
  first->on_complete([outer, then = std::move(then)](Work& inner) {
    std::exception_ptr error = inner.exception();
    // As every collective, it writes bytes. Autograd would refuse to write to tensors of inference
    // mode, which the caller may have left on and this thread never has.
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    try {
      if (!error) then();
    } catch (...) {
      error = std::current_exception();
    }
    outer->finish(error, inner.source_rank());
  });
  return outer;
}

WorkPtr followed_by(const WorkPtr& first, std::function<WorkPtr()> next) {
  auto outer = std::make_shared<Work>(first->description(), std::vector<at::Tensor>());
  first->on_complete([outer, next = std::move(next)](Work& inner) {
    try {
      if (const auto error = inner.exception()) std::rethrow_exception(error);
      next()->on_complete([outer](Work& last) { outer->finish(last.exception()); });
    } catch (...) {
      outer->finish(std::current_exception());
    }
  });
  return outer;
}

WorkPtr all_of(const std::vector<WorkPtr>& works, std::vector<at::Tensor> tensors) {
  auto outer = std::make_shared<Work>(works.front()->description(), std::move(tensors));
  auto join = std::make_shared<Join>(works.size(), outer);
  for (const WorkPtr& work : works) {
    work->on_complete([join](Work& part) { join->part_done(part); });
  }
  return outer;
}

WorkPtr done(std::string description, std::vector<at::Tensor> tensors) {
  auto work = std::make_shared<Work>(std::move(description), std::move(tensors));
  work->finish();
  return work;
}

}  // namespace libddp
