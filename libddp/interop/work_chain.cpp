#include "libddp/interop/work_chain.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "libddp/group/current_stream.h"
#include "libddp/group/stream_work.h"

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

WorkPtr joined_on_host(const std::vector<WorkPtr>& works, std::vector<at::Tensor> tensors) {
  auto outer = std::make_shared<Work>(works.front()->description(), std::move(tensors));
  auto join = std::make_shared<Join>(works.size(), outer);
  for (const WorkPtr& work : works) {
    work->on_complete([join](Work& part) { join->part_done(part); });
  }
  return outer;
}

/// The first that is done in the order of a stream; null if there is none.
WorkPtr first_on_device(const std::vector<WorkPtr>& works) {
  const auto found = std::find_if(works.begin(), works.end(),
                                  [](const WorkPtr& work) { return work->is_stream_ordered(); });
  return found == works.end() ? nullptr : *found;
}

/// Works as one, some of them on a device: who waits waits for each.
class StreamJoin final : public Work {
 public:
  StreamJoin(std::vector<WorkPtr> works, std::vector<at::Tensor> tensors)
      : Work(works.front()->description(), std::move(tensors)), works_(std::move(works)) {}

  void wait(std::optional<std::chrono::milliseconds> timeout) override {
    for (const WorkPtr& work : works_) work->wait(timeout);
  }
  void order_stream() noexcept override {
    for (const WorkPtr& work : works_) work->order_stream();
  }
  bool is_stream_ordered() const override { return true; }
  c10::Device device() const override { return first_on_device(works_)->device(); }
  void synchronize() override {
    for (const WorkPtr& work : works_) work->synchronize();
  }
  bool is_completed() const override {
    return std::all_of(works_.begin(), works_.end(),
                       [](const WorkPtr& work) { return work->is_completed(); });
  }
  void on_complete(std::function<void(Work&)> callback) override {
    joined_on_host(works_, result())->on_complete(std::move(callback));
  }

 private:
  const std::vector<WorkPtr> works_;
};

/// What the current stream has by now.
WorkPtr launched(const WorkPtr& first, std::vector<at::Tensor> tensors) {
  const c10::Device device = first->device();
  auto operation = std::make_shared<DeviceOperation>(
      OpDescription(), 0, std::chrono::milliseconds(0), EventPool(device.type()).take());
  operation->record_end(current_stream_on(device));
  const auto finish_as = [first](const std::shared_ptr<StreamWork>& work) {
    first->on_complete([work](Work& inner) { work->finish(inner.exception()); });
  };
  return std::make_shared<StreamWork>(std::move(operation), std::move(tensors), device,
                                      StreamWork::Wait::Stream, finish_as);
}

}  // namespace

WorkPtr after(const WorkPtr& first, std::vector<at::Tensor> tensors, std::function<void()> then) {
  if (first->is_stream_ordered()) {
    first->wait();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    then();
    return launched(first, std::move(tensors));
  }
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
  if (first->is_stream_ordered()) {
    first->wait();
    return next();
  }
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
  if (first_on_device(works)) return std::make_shared<StreamJoin>(works, std::move(tensors));
  return joined_on_host(works, std::move(tensors));
}
WorkPtr done(std::string description, std::vector<at::Tensor> tensors) {
  auto work = std::make_shared<Work>(std::move(description), std::move(tensors));
  work->finish();
  return work;
}

}  // namespace libddp
