#include "libddp/interop/c10d_stage.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/interop/c10d_failure.h"
#include "libddp/interop/c10d_reduction.h"

namespace libddp {
namespace {

/// How often a wait looks whether the group has failed.
constexpr std::chrono::milliseconds kLook{20};
/// The control connections mostly know better who has failed.
constexpr std::chrono::seconds kCausePatience{1};
constexpr std::chrono::hours kNoLimit{24};
/// What has not ended so long after its deadline is given up here: some engines know no deadlines.
/// Less than the patience of the ranks that wait for this one (HierarchicalComm).
constexpr std::chrono::milliseconds kEnginePatience{500};

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float32:
      return at::kFloat;
    case Dtype::Float64:
      return at::kDouble;
    case Dtype::BFloat16:
      return at::kBFloat16;
    case Dtype::Float16:
      return at::kHalf;
    case Dtype::Int8:
      return at::kChar;
    case Dtype::UInt8:
      return at::kByte;
    case Dtype::Int16:
      return at::kShort;
    case Dtype::Int32:
      return at::kInt;
    case Dtype::Int64:
      return at::kLong;
    case Dtype::Bool:
      return at::kBool;
    case Dtype::Float8E4M3:
      return at::kFloat8_e4m3fn;
    case Dtype::Float8E5M2:
      return at::kFloat8_e5m2;
  }
  return at::kByte;
}

/// One wait, shared with the thread that waits.
struct Ending {
  std::mutex mutex;
  std::condition_variable changed;
  bool has_come = false;
  std::exception_ptr error;
};

}  // namespace

C10dStage::C10dStage(ShmComm& local, GroupIdentity identity, InterPlace place,
                     std::unique_ptr<InterStage> links, c10::intrusive_ptr<c10d::Backend> engine)
    : local_(local),
      identity_(std::move(identity)),
      place_(place),
      links_(std::move(links)),
      engine_(std::move(engine)) {}

void C10dStage::begin(const CommCall& call) {
  call_ = &call;
  deadline_ = call.timeout ? Deadline::after(*call.timeout) : call.deadline;
  links_->begin(call);
}

at::Tensor C10dStage::scratch(std::size_t bytes) const {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
}

std::chrono::milliseconds C10dStage::time_left() const {
  return std::chrono::ceil<std::chrono::milliseconds>(deadline_.remaining(kNoLimit)) +
         std::chrono::milliseconds(1);
}

void C10dStage::all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                           int num_averaged) {
  const std::size_t bytes = count * element_bytes(reduction.dtype);
  if (bytes <= kSmallBytes) return links_->all_reduce(data, count, reduction, num_averaged);
  links_->barrier();
  at::Tensor own = scratch(bytes);
  std::memcpy(own.data_ptr(), data, bytes);
  own = own.view(scalar_type(reduction.dtype));
  const C10dReduction wire(own, reduction.op, reduction.scale, num_averaged);
  run([&](std::chrono::milliseconds timeout) {
    c10d::AllreduceOptions options;
    options.reduceOp = wire.op();
    options.timeout = timeout;
    std::vector<at::Tensor> tensors{wire.wire()};
    return engine_->allreduce(tensors, options);
  });
  wire.finish(own, wire.wire());
  std::memcpy(data, own.const_data_ptr(), bytes);
}

// Blocks of the largest size, as in all_gather.
void C10dStage::reduce_scatter(const std::vector<Region>& regions, int host, std::byte* output,
                               const Reduction& reduction, int num_averaged) {
  std::size_t largest = 0;
  for (const Region& region : regions) largest = std::max(largest, region.bytes);
  if (largest <= kSmallBytes || !has_reduce_scatter_) {
    return InterStage::reduce_scatter(regions, host, output, reduction, num_averaged);
  }
  links_->barrier();
  at::Tensor all = scratch(largest * regions.size());
  auto* to = static_cast<std::byte*>(all.data_ptr());
  for (const Region& region : regions) {
    if (region.bytes > 0) std::memcpy(to, region.data, region.bytes);
    std::memset(to + region.bytes, 0, largest - region.bytes);
    to += largest;
  }
  const at::ScalarType dtype = scalar_type(reduction.dtype);
  const C10dReduction wire(all.view(dtype), reduction.op, reduction.scale, num_averaged);
  at::Tensor input = wire.wire();
  const auto num_blocks = static_cast<std::int64_t>(regions.size());
  at::Tensor block = at::empty({input.numel() / num_blocks}, input.options());
  has_reduce_scatter_ = try_run([&](std::chrono::milliseconds timeout) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = wire.op();
    options.timeout = timeout;
    return engine_->_reduce_scatter_base(block, input, options);
  });
  if (!has_reduce_scatter_) {
    return InterStage::reduce_scatter(regions, host, output, reduction, num_averaged);
  }
  at::Tensor own = scratch(largest).view(dtype);
  wire.finish(own, block);
  std::memcpy(output, own.const_data_ptr(), regions[static_cast<std::size_t>(host)].bytes);
}

// Blocks of the largest size: the hosts have mostly equally many ranks.
void C10dStage::all_gather(const std::vector<Region>& regions) {
  std::size_t largest = 0;
  for (const Region& region : regions) largest = std::max(largest, region.bytes);
  if (largest <= kSmallBytes) return links_->all_gather(regions);
  links_->barrier();
  at::Tensor own = scratch(largest);
  at::Tensor all = scratch(largest * regions.size());
  const Region& mine = regions[static_cast<std::size_t>(place_.host)];
  if (mine.bytes > 0) std::memcpy(own.data_ptr(), mine.data, mine.bytes);
  run([&](std::chrono::milliseconds timeout) {
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    return engine_->_allgather_base(all, own, options);
  });
  const auto* from = static_cast<const std::byte*>(all.const_data_ptr());
  for (const Region& region : regions) {
    if (region.data != mine.data && region.bytes > 0) std::memcpy(region.data, from, region.bytes);
    from += largest;
  }
}

void C10dStage::broadcast(std::byte* data, std::size_t bytes, int root_host) {
  if (bytes <= kSmallBytes) return links_->broadcast(data, bytes, root_host);
  links_->barrier();
  std::vector<at::Tensor> tensors{scratch(bytes)};
  const bool is_root = place_.host == root_host;
  if (is_root) std::memcpy(tensors[0].data_ptr(), data, bytes);
  run([&](std::chrono::milliseconds timeout) {
    c10d::BroadcastOptions options;
    options.rootRank = root_host;
    options.timeout = timeout;
    return engine_->broadcast(tensors, options);
  });
  if (!is_root) std::memcpy(data, tensors[0].const_data_ptr(), bytes);
}

void C10dStage::run(const Issue& issue) {
  WorkHandle work;
  try {
    work = issue(time_left());
  } catch (...) {
    give_up(std::current_exception());
  }
  wait_for(work);
}

bool C10dStage::try_run(const Issue& issue) {
  WorkHandle work;
  try {
    work = issue(time_left());
  } catch (const c10::Error& error) {
    if (is_unsupported(error)) return false;
    give_up(std::current_exception());
  } catch (...) {
    give_up(std::current_exception());
  }
  wait_for(work);
  return true;
}

void C10dStage::wait_for(const WorkHandle& work) {
  const auto ending = std::make_shared<Ending>();
  waiters_.watch([work, engine = engine_] { work->wait(); },
                 [ending](std::exception_ptr error) {
                   std::lock_guard lock(ending->mutex);
                   ending->has_come = true;
                   ending->error = std::move(error);
                   ending->changed.notify_all();
                 });
  const std::chrono::milliseconds limit = time_left() + kEnginePatience;
  const Deadline patience = deadline_.is_never() ? Deadline::never() : Deadline::after(limit);
  std::unique_lock lock(ending->mutex);
  while (!ending->changed.wait_for(lock, kLook, [&] { return ending->has_come; })) {
    lock.unlock();
    local_.throw_if_failed(call_);
    check_interrupt();
    if (patience.expired()) {
      fail(std::make_exception_ptr(
          std::runtime_error("timed out, by libddp's clock: the engine has not ended it")));
    }
    lock.lock();
  }
  if (ending->error) give_up(ending->error);
}

void C10dStage::give_up(const std::exception_ptr& error) {
  const Deadline patience = Deadline::after(kCausePatience);
  while (!patience.expired()) {
    local_.throw_if_failed(call_);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  fail(error);
}

void C10dStage::fail(const std::exception_ptr& error) {
  GroupFailure failure;
  try {
    std::rethrow_exception(error_of_c10d(error, call_->description.to_string(call_->sequence),
                                         "between hosts, " + engine_->getBackendName()));
  } catch (const TimeoutError& e) {
    failure = {GroupFailure::Kind::Timeout, e.what()};
  } catch (const std::exception& e) {
    failure = {GroupFailure::Kind::Peer, e.what()};
  }
  local_.fail(std::move(failure));
  local_.throw_if_failed(call_);
  throw StateError(identity_.where() + ": a failure was not kept");
}

}  // namespace libddp
