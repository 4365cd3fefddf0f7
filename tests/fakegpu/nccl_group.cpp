#include "tests/fakegpu/nccl_group.h"

#include <algorithm>
#include <set>
#include <utility>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/nccl_faults.h"
#include "tests/fakegpu/nccl_reduce.h"

namespace mock_nccl {
namespace {

void add_range(const void* begin, std::size_t bytes, std::vector<fakegpu::ByteRange>& ranges) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  ranges.push_back({address, address + bytes});
}

/// `to` goes on behind what `from` has, as for an event.
void wait_for(fakegpu::DeviceStream& from, fakegpu::DeviceStream& to) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_open = false;
  };
  const auto gate = std::make_shared<Gate>();
  from.enqueue([gate] {
    const std::lock_guard lock(gate->mutex);
    gate->is_open = true;
    gate->changed.notify_all();
  });
  to.enqueue([gate] {
    std::unique_lock lock(gate->mutex);
    gate->changed.wait(lock, [&] { return gate->is_open; });
  });
  fakegpu::AccessLog::get().order(from, to);
}

}  // namespace

Group& Group::current() {
  thread_local Group group;
  return group;
}

ncclResult_t Group::end() {
  if (depth_ == 0) return ncclInvalidUsage;
  if (--depth_ > 0) return ncclSuccess;
  return issue();
}

ncclResult_t Group::add(const std::string& function, Communicator& communicator,
                        fakegpu::DeviceStream& stream, OpCall call) {
  pending_.push_back({function, &communicator, &stream, std::move(call)});
  return depth_ == 0 ? issue() : ncclSuccess;
}

ncclResult_t Group::refuse(ncclResult_t error) {
  if (depth_ > 0 && error_ == ncclSuccess) error_ = error;
  return error;
}

ncclResult_t Group::issue() {
  const std::vector<Pending> all = std::exchange(pending_, {});
  const ncclResult_t error = std::exchange(error_, ncclSuccess);
  if (error != ncclSuccess) return error;
  std::vector<Communicator*> communicators;
  for (const Pending& call : all) {
    if (std::find(communicators.begin(), communicators.end(), call.communicator) ==
        communicators.end())
      communicators.push_back(call.communicator);
  }
  for (Communicator* const communicator : communicators) {
    std::vector<Pending> calls;
    std::copy_if(all.begin(), all.end(), std::back_inserter(calls),
                 [&](const Pending& call) { return call.communicator == communicator; });
    issue_together(calls);
  }
  return ncclSuccess;
}

void Group::issue_together(const std::vector<Pending>& calls) {
  Communicator& communicator = *calls.front().communicator;
  fakegpu::DeviceStream& stream = *calls.front().stream;
  Faults& faults = Faults::get();
  const Faults::Operation operation = faults.begin_operation(communicator.rank());
  std::vector<fakegpu::ByteRange> reads;
  std::vector<fakegpu::ByteRange> writes;
  std::vector<OpCall> op_calls;
  std::set<fakegpu::DeviceStream*> others;
  std::string name = "nccl";
  for (const Pending& pending : calls) {
    const WireCall& wire = pending.call.wire;
    op_calls.push_back(pending.call);
    add_range(pending.call.send, wire.send_bytes, reads);
    add_range(pending.call.recv, wire.recv_bytes, writes);
    if (pending.stream != &stream) others.insert(pending.stream);
    name += " " + pending.function;
    const std::lock_guard lock(faults.mutex);
    faults.wishes.issued.push_back({pending.function, communicator.rank(), communicator.number(),
                                    operation.number, pending.stream->stream(),
                                    static_cast<ncclDataType_t>(wire.dtype), wire.count, wire.peer,
                                    static_cast<ncclRedOp_t>(wire.reduction)});
  }
  // A group's streams meet before and after it, as in NCCL.
  for (fakegpu::DeviceStream* const other : others) wait_for(*other, stream);
  add_range(communicator.turn(), 1, writes);
  fakegpu::AccessLog::get().launch(stream, name, reads, writes);
  if (operation.ends_alone) op_calls.clear();
  communicator.issue(stream, std::move(op_calls), operation.hangs, operation.delay_ms);
  if (operation.async_error != ncclSuccess) communicator.async_error = operation.async_error;
  for (const std::function<void()>& function : operation.meanwhile) function();
  for (fakegpu::DeviceStream* const other : others) wait_for(stream, *other);
}

}  // namespace mock_nccl
