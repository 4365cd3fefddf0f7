#include "libddp/interop/c10d_backend.h"

#include <fmt/format.h>

#include "libddp/interop/c10d_run.h"
#include "libddp/interop/callback_thread.h"
#include "libddp/interop/convert.h"
#include "libddp/interop/torch_errors.h"

namespace libddp {

c10::intrusive_ptr<C10dBackend> C10dBackend::create(c10::intrusive_ptr<c10d::Store> store,
                                                    ProcessGroup::Options options) {
  return for_torch([&] {
    Group group = ProcessGroup::create(store, std::move(options));
    return c10::make_intrusive<C10dBackend>(std::move(store), std::move(group));
  });
}

C10dBackend::C10dBackend(c10::intrusive_ptr<c10d::Store> store, Group group)
    : c10d::Backend(group->rank(), group->size()),
      group_(std::move(group)),
      monitored_barrier_(std::move(store), group_) {}

C10dBackend::~C10dBackend() { CallbackThread::release(group_.get()); }

Group C10dBackend::group_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* ours = dynamic_cast<C10dBackend*>(backend.get());
  return ours == nullptr ? nullptr : ours->group();
}

c10::intrusive_ptr<c10d::Backend::Options> C10dBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(kName, group_->timeout());
  options->group_name = group_->name();
  for (int rank : group_->global_ranks()) {
    options->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  }
  return options;
}

void C10dBackend::setTimeout(std::chrono::milliseconds timeout) { group_->set_timeout(timeout); }

c10d::ErrorType C10dBackend::getError() {
  const std::exception_ptr failure = group_->failure();
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
  return for_torch(
      [&] { return group_->allocate({size}, c10::typeMetaToScalarType(options.dtype())); });
}

c10::intrusive_ptr<c10d::Backend> C10dBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& opts) {
  Group part = for_torch([&] { return group_->split(ranks, opts ? opts->group_name : ""); });
  if (!part) return nullptr;
  if (opts) part->set_timeout(opts->timeout);
  return c10::make_intrusive<C10dBackend>(store, std::move(part));
}

void C10dBackend::abort() {
  for_torch([&] { group_->abort(fmt::format("rank {} called abort()", group_->rank())); });
}

void C10dBackend::shutdown() {
  for_torch([&] { group_->shutdown(); });
}

C10dBackend::WorkHandle C10dBackend::barrier(const c10d::BarrierOptions& opts) {
  return run({c10d::OpType::BARRIER, "libddp:barrier", {}}, {},
             [&] { return group_->barrier(call_options(opts.timeout, opts.asyncOp)); });
}

void C10dBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // Zero means zero here, as with Gloo: rank 0 looks once who is there.
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? group_->timeout() : opts.timeout;
  for_torch([&] { monitored_barrier_.wait(timeout, wait_all_ranks); });
}

}  // namespace libddp
