#include "libddp/interop/foreign_backend.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/group/current_stream.h"
#include "libddp/group/device_operation.h"
#include "libddp/group/operand.h"
#include "libddp/group/stream_work.h"
#include "libddp/interop/c10d_failure.h"
#include "libddp/interop/c10d_reduction.h"
#include "libddp/interop/foreign_state.h"
#include "libddp/interop/gloo_engine.h"

namespace libddp {

ForeignBackend::ForeignBackend(c10::intrusive_ptr<c10d::Backend> inner, GroupIdentity identity,
                               c10::intrusive_ptr<c10d::Store> store,
                               std::vector<c10::DeviceType> devices)
    : state_(std::make_shared<State>(std::move(inner), std::move(identity), std::move(store))),
      devices_(std::move(devices)) {}

ForeignBackend::~ForeignBackend() {
  if (waiters_->is_idle()) return;
  state_->fail(std::make_exception_ptr(
      StateError(state_->where("end") +
                 ": the group was destroyed with operations in flight. Hint: wait for them, or "
                 "call shutdown() first.")));
}

std::string ForeignBackend::name() const { return "c10d:" + state_->inner_name; }

bool ForeignBackend::moves(c10::DeviceType type) const {
  if (!devices_.empty()) return std::find(devices_.begin(), devices_.end(), type) != devices_.end();
  // Only NCCL is known to take no CPU tensors; what another library does not take it refuses.
  const bool is_nccl = state_->inner_name.rfind("nccl", 0) == 0;
  return !is_nccl || type != c10::DeviceType::CPU;
}

std::uint64_t ForeignBackend::sequence_number() const {
  std::lock_guard lock(state_->issue_mutex);
  return state_->sequence;
}

at::Tensor ForeignBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype,
                                    c10::Device device) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
}

std::exception_ptr ForeignBackend::failure() const {
  std::lock_guard lock(state_->mutex);
  return state_->failure;
}

void ForeignBackend::abort(const std::string& reason) noexcept {
  try {
    state_->fail(std::make_exception_ptr(StateError(state_->where("abort") +
                                                    ": the group was aborted: " + reason +
                                                    ". Hint: make a new group to go on.")));
    state_->inner->abort();
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "abort_failed", {{"backend", name()}, {"error", error.what()}});
  }
}

// What hangs in a failed group is left behind.
void ForeignBackend::shutdown() {
  constexpr std::chrono::seconds kPatience{1};
  std::optional<Deadline> patience;
  waiters_->drain([&] {
    if (!patience && failure()) patience = Deadline::after(kPatience);
    return patience && patience->expired();
  });
}

WorkPtr ForeignBackend::start(BackendCall call, bool is_numbered,
                              const std::function<Flight()>& issue, std::function<void()> finish) {
  if (!call.device.is_cpu()) {
    return start_on_device(std::move(call), is_numbered, issue, std::move(finish));
  }
  WorkPtr work;
  {
    std::lock_guard lock(state_->issue_mutex);
    std::uint64_t& number = is_numbered ? state_->sequence : state_->num_messages;
    Flight flight = state_->issue(call.description, number + 1, issue);
    work = std::make_shared<Work>(call.description, ++number, std::move(call.results));
    state_->add(work);
    const auto shared = std::make_shared<const Flight>(std::move(flight));
    const auto kind = is_numbered ? ForeignClock::Kind::Collective : ForeignClock::Kind::Message;
    const std::uint64_t ticket = state_->clock.start(
        call.timeout, kind, [weak = std::weak_ptr<State>(state_), work, timeout = call.timeout] {
          if (const auto state = weak.lock()) state->give_up(work, timeout);
        });
    waiters_->watch([shared, timeout = call.timeout] { shared->wait(timeout); },
                    [state = state_, work, shared, ticket, finish = std::move(finish),
                     on_success = std::move(call.on_success)](const std::exception_ptr& error) {
                      state->clock.end(ticket);
                      const std::exception_ptr ours = error_of_c10d(
                          error, state->where(work->description()), state->inner_name);
                      state->end(work, ours, ours ? -1 : shared->source(), [&] {
                        if (finish) finish();
                        if (on_success) on_success();
                      });
                    });
  }
  if (!call.async) work->wait();
  return work;
}

// A stream of our own waits for the other library's and finishes behind it, so that nothing waits
// in the caller's stream before the caller does.
WorkPtr ForeignBackend::start_on_device(BackendCall call, bool is_numbered,
                                        const std::function<Flight()>& issue,
                                        std::function<void()> finish) {
  const c10::DeviceGuard device(call.device);
  WorkPtr work;
  {
    const std::lock_guard lock(state_->issue_mutex);
    std::uint64_t& number = is_numbered ? state_->sequence : state_->num_messages;
    const Flight flight = state_->issue(call.description, number + 1, issue);
    auto operation = std::make_shared<DeviceOperation>(call.description, ++number, call.timeout,
                                                       state_->event_for(call.device.type()));
    const auto ends = [finish = std::move(finish), on_success = std::move(call.on_success)] {
      if (finish) finish();
      if (on_success) on_success();
    };
    {
      const c10::StreamGuard side(state_->stream_of(call.device));
      flight.wait(call.timeout);
      ends();
      operation->record_end(side.current_stream());
    }
    operation->hold(call.results, ends, current_stream_on(call.device));
    const auto finisher = [waiters = std::weak_ptr<C10dWaiters>(waiters_)](
                              const std::shared_ptr<StreamWork>& ending) {
      const auto look = [ending] { ending->synchronize(); };
      if (const auto thread = waiters.lock()) {
        thread->watch(look, [ending](const std::exception_ptr& error) { ending->finish(error); });
      } else {
        look();
        ending->finish();
      }
    };
    work = std::make_shared<StreamWork>(std::move(operation), std::move(call.results), call.device,
                                        StreamWork::Wait::Stream, finisher);
  }
  if (!call.async) work->wait();
  return work;
}

WorkPtr ForeignBackend::all_reduce(BackendCall call, const at::Tensor& tensor, double scale) {
  if (tensor.numel() == 0) return barrier(std::move(call));
  const auto reduction = std::make_shared<C10dReduction>(tensor, call.description.reduce_op, scale,
                                                         state_->identity.world_size);
  c10d::AllreduceOptions options;
  options.reduceOp = reduction->op();
  options.timeout = call.timeout;
  return start(
      std::move(call), true,
      [&] {
        std::vector<at::Tensor> wires{reduction->wire()};
        return Flight{{state_->inner->allreduce(wires, options)}};
      },
      [reduction, tensor] { reduction->finish(tensor, reduction->wire()); });
}

WorkPtr ForeignBackend::broadcast(BackendCall call, const at::Tensor& tensor, int root) {
  if (tensor.numel() == 0) return barrier(std::move(call));
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = call.timeout;
  return start(
      std::move(call), true,
      [&] {
        std::vector<at::Tensor> wires{bytes_of(tensor)};
        return Flight{{state_->inner->broadcast(wires, options)}};
      },
      nullptr);
}

WorkPtr ForeignBackend::all_gather(BackendCall call, const at::Tensor& output,
                                   const at::Tensor& input) {
  if (output.numel() == 0) return barrier(std::move(call));
  c10d::AllgatherOptions options;
  options.timeout = call.timeout;
  at::Tensor to = bytes_of(output);
  at::Tensor from = bytes_of(input);
  return start(
      std::move(call), true,
      [&]() -> Flight {
        try {
          return {{state_->inner->_allgather_base(to, from, options)}};
        } catch (const c10::Error& error) {
          if (!is_unsupported(error)) throw;
        }
        std::vector<std::vector<at::Tensor>> outputs{to.chunk(state_->identity.world_size)};
        std::vector<at::Tensor> inputs{from};
        return {{state_->inner->allgather(outputs, inputs, options)}};
      },
      [from] {});
}

WorkPtr ForeignBackend::reduce_scatter(BackendCall call, const at::Tensor& output,
                                       const at::Tensor& input, double scale) {
  if (input.numel() == 0) return barrier(std::move(call));
  const auto reduction = std::make_shared<C10dReduction>(
      input, call.description.reduce_op, scale, state_->identity.world_size, /*keep_input=*/true);
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction->op();
  options.timeout = call.timeout;
  c10d::AllreduceOptions whole;
  whole.reduceOp = reduction->op();
  whole.timeout = call.timeout;
  // Own memory: `output` may be a part of `input`.
  at::Tensor block = at::empty({output.numel()}, reduction->wire().options());
  at::Tensor wire = reduction->wire();
  const auto result = std::make_shared<at::Tensor>(block);
  return start(
      std::move(call), true,
      [&]() -> Flight {
        try {
          return {{state_->inner->_reduce_scatter_base(block, wire, options)}};
        } catch (const c10::Error& error) {
          if (!is_unsupported(error)) throw;
        }
        *result = wire.narrow(0, state_->identity.rank * output.numel(), output.numel());
        std::vector<at::Tensor> wires{wire};
        return {{state_->inner->allreduce(wires, whole)}};
      },
      [reduction, output, result] { reduction->finish(output, *result); });
}

WorkPtr ForeignBackend::barrier(BackendCall call) {
  c10d::BarrierOptions options;
  options.timeout = call.timeout;
  return start(
      std::move(call), true, [&] { return Flight{{state_->inner->barrier(options)}}; }, nullptr);
}

// ForeignBackend::exchange: blocks as the other library's all-to-all, messages as its send and
// recv.

namespace {

bool is_send(const Exchange& part) { return part.direction == Exchange::Direction::Send; }

/// The blocks of one direction, one after another in the order of their ranks.
struct PackedBlocks {
  PackedBlocks(const std::vector<Exchange>& parts, Exchange::Direction direction, int world_size,
               c10::Device device)
      : splits(static_cast<std::size_t>(world_size), 0) {
    std::int64_t total = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      for (const Exchange& part : parts) {
        if (part.direction != direction || part.peer != rank) continue;
        blocks.push_back(bytes_of(part.tensor));
        splits[static_cast<std::size_t>(rank)] += static_cast<std::int64_t>(part.tensor.nbytes());
        total += static_cast<std::int64_t>(part.tensor.nbytes());
      }
    }
    flat = at::empty({total}, at::TensorOptions().dtype(at::kByte).device(device));
  }

  void fill() const { pack(blocks, flat); }
  void spread() const { unpack(flat, blocks); }

  at::Tensor flat;
  std::vector<std::int64_t> splits;
  std::vector<at::Tensor> blocks;
};

}  // namespace

WorkPtr ForeignBackend::exchange(BackendCall call, std::vector<Exchange> parts) {
  const OpKind kind = call.description.kind;
  const bool is_message = kind == OpKind::Send || kind == OpKind::Recv;
  if (is_message) return exchange_messages(std::move(call), parts);
  return exchange_blocks(std::move(call), parts);
}

WorkPtr ForeignBackend::exchange_blocks(BackendCall call, const std::vector<Exchange>& parts) {
  const int world_size = state_->identity.world_size;
  const PackedBlocks sends(parts, Exchange::Direction::Send, world_size, call.device);
  const auto receives =
      std::make_shared<PackedBlocks>(parts, Exchange::Direction::Recv, world_size, call.device);
  sends.fill();
  c10d::AllToAllOptions options;
  options.timeout = call.timeout;
  return start(
      std::move(call), true,
      [&] {
        at::Tensor from = sends.flat;
        auto from_splits = sends.splits;
        return Flight{{state_->inner->alltoall_base(receives->flat, from, receives->splits,
                                                    from_splits, options)}};
      },
      [receives, sent = sends.flat] { receives->spread(); });
}

// Receives first, so that what comes finds its place.
WorkPtr ForeignBackend::exchange_messages(BackendCall call, const std::vector<Exchange>& parts) {
  return start(
      std::move(call), false,
      [&] {
        Flight flight;
        flight.is_message = true;
        for (const bool sends : {false, true}) {
          for (const Exchange& part : parts) {
            if (is_send(part) != sends) continue;
            std::vector<at::Tensor> wires{bytes_of(part.tensor)};
            if (!sends && flight.source_rank == -2) {
              flight.source_rank = part.peer;
              flight.receive = flight.works.size();
            }
            c10d::Backend& inner = *state_->inner;
            flight.works.push_back(sends            ? inner.send(wires, part.peer, part.tag)
                                   : part.peer >= 0 ? inner.recv(wires, part.peer, part.tag)
                                                    : inner.recvAnysource(wires, part.tag));
          }
        }
        return flight;
      },
      [parts] {});
}

// ForeignBackend::split: a part of the other library's group, made by that library.

namespace {

/// Gloo writes into what it is given for a part, and reads the whole's ranks without a check.
c10::intrusive_ptr<c10d::Backend::Options> options_for_part(c10d::Backend& whole) {
  auto own = backend_options(whole);
  if (!own) return nullptr;
  for (int rank = 0; own->global_ranks_in_group.size() < static_cast<std::size_t>(whole.getSize());
       ++rank) {
    own->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  }
  return copy_of_gloo_options(own);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend::Options> backend_options(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::unique_ptr<Backend> ForeignBackend::split(const std::vector<int>& ranks,
                                               const GroupIdentity& part) {
  if (!state_->store || !state_->inner->supportsSplitting()) return nullptr;
  std::string place = fmt::format("libddp/split/{}/{}", part.name, fmt::join(ranks, ","));
  {
    // The same ranks may part under the same name again; what they left in the store is old then.
    const std::lock_guard lock(state_->mutex);
    place += fmt::format("/{}/", state_->num_parts[place]++);
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>(place, state_->store);
  c10::intrusive_ptr<c10d::Backend> inner;
  try {
    inner = state_->inner->split(store, ranks, options_for_part(*state_->inner));
  } catch (...) {
    std::rethrow_exception(error_of_c10d(std::current_exception(),
                                         state_->where("split " + part.name), state_->inner_name));
  }
  if (!inner) return nullptr;
  return std::make_unique<ForeignBackend>(std::move(inner), part, std::move(store), devices_);
}

}  // namespace libddp
