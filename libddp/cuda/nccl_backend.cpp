#include "libddp/cuda/nccl_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/bootstrap/run_key.h"
#include "libddp/bootstrap/sealed_store.h"
#include "libddp/cuda/device_facts.h"
#include "libddp/cuda/nccl_memory.h"
#include "libddp/cuda/nccl_rendezvous.h"
#include "libddp/cuda/nccl_types.h"
#include "libddp/cuda/stream_capture.h"
#include "libddp/group/current_stream.h"
#include "libddp/group/operand.h"
#include "libddp/rendezvous/torch_store.h"

namespace libddp {
namespace {

std::string device_name(c10::DeviceType type) { return c10::DeviceTypeName(type, true); }

std::size_t count_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

std::vector<at::Tensor> tensors_of(const std::vector<BlockPair>& pairs) {
  std::vector<at::Tensor> tensors;
  for (const auto& [whole, block] : pairs) {
    tensors.push_back(whole);
    tensors.push_back(block);
  }
  return tensors;
}

std::unique_ptr<Backend> create_cuda(const BackendRequest& request) {
  return std::make_unique<NcclBackend>(request, c10::DeviceType::CUDA);
}

/// Accelerators that torch has no name for, where somebody brings an NCCL for them (the tests do).
std::unique_ptr<Backend> create_private(const BackendRequest& request) {
  return std::make_unique<NcclBackend>(request, c10::DeviceType::PrivateUse1);
}

const BackendRegistration cuda(c10::DeviceType::CUDA, create_cuda);
const BackendRegistration private_use(c10::DeviceType::PrivateUse1, create_private);

}  // namespace

NcclBackend::NcclBackend(const BackendRequest& request, c10::DeviceType type)
    : identity_{request.options.name, request.options.rank, request.options.world_size},
      type_(type),
      api_(NcclApi::get()),
      host_(*request.host),
      store_(request.store),
      prefix_(request.prefix + "nccl/"),
      join_timeout_(request.options.timeout),
      is_timed_(env_flag("LIBDDP_NCCL_TIMING", false)),
      events_(type, is_timed_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT),
      flights_(std::make_shared<DeviceFlights>(identity_, api_, host_, device_name(type))) {
  DeviceWatchdog::get().add(flights_);
  host_.hear_calls([flights = std::weak_ptr(flights_)](int rank, const LastCalls& calls) {
    if (const auto alive = flights.lock()) alive->hear(rank, calls);
  });
}

NcclBackend::~NcclBackend() {
  DeviceWatchdog::get().remove(*flights_);
  try {
    throw StateError(fmt::format(
        "{}: the group was destroyed without shutdown (destroy_process_group)", identity_.where()));
  } catch (const Error&) {
    flights_->end_all(std::current_exception());
  }
}

std::optional<c10::Device> NcclBackend::device() const {
  const int index = device_index_.load();
  if (index < 0) return std::nullopt;
  return c10::Device(type_, static_cast<c10::DeviceIndex>(index));
}

std::string NcclBackend::where(const BackendCall& call) const {
  return fmt::format("{} {} on {}", identity_.where(), libddp::name(call.description.kind),
                     call.device.str());
}

// One process drives one device in a group, as launchers and torch's wrappers have it.
void NcclBackend::use_device(c10::Device device) {
  const int index = device.index();
  int expected = -1;
  if (device_index_.compare_exchange_strong(expected, index) || expected == index) return;
  throw ArgumentError(fmt::format(
      "{}: a tensor is on device {}, but this group's communicator is on {}:{}, and a rank has one "
      "device in a group. Hint: call torch.cuda.set_device(LOCAL_RANK) before the first "
      "collective, or make another group for other devices.",
      identity_.where(), device.str(), device_name(type_), expected));
}

void NcclBackend::connect(c10::Device device) {
  const std::lock_guard lock(mutex_);
  flights_->throw_if_failed();
  const c10::DeviceGuard current(device);
  use_device(c10::impl::VirtualGuardImpl(type_).getDevice());
  channel_of_all();
}

NcclBackend::Channel NcclBackend::join(const std::string& name, int rank, int world_size) {
  const Deadline deadline = Deadline::after(join_timeout_);
  const std::string site = identity_.where() + " join";
  const auto look = [this] { flights_->throw_if_failed(); };
  try {
    TorchStore keys(store_, prefix_, {.deadline = deadline, .look = look});
    std::optional<SealedStore> sealed;
    if (const auto key = given_run_key()) sealed.emplace(keys, key, "group " + identity_.name);
    KeyValueStore& store = sealed ? static_cast<KeyValueStore&>(*sealed) : keys;
    const std::string identity = may_share_devices(api_) ? "" : device_identity(*device());
    std::vector<ncclUniqueId> ids =
        meet(api_, store, {name, rank, world_size, identity, site}, deadline);
    auto communicator = std::make_shared<NcclCommunicator>(
        api_, std::move(ids), NcclCommunicator::Place{rank, world_size, *device(), site}, deadline,
        look);
    return {std::move(communicator),
            c10::impl::VirtualGuardImpl(type_).getStreamFromGlobalPool(*device(), true),
            events_.take()};
  } catch (const SharedDeviceError&) {
    // All ranks have read the same: none has to be told.
    flights_->end_all(std::current_exception());
    throw;
  } catch (const Error& error) {
    if (flights_->failure()) throw;
    const bool is_late = dynamic_cast<const TimeoutError*>(&error) != nullptr;
    host_.fail({is_late ? GroupFailure::Kind::Timeout : GroupFailure::Kind::Device,
                first_line_of(std::current_exception())});
    throw;
  }
}

NcclBackend::Channel& NcclBackend::channel_of_all() {
  if (!all_) {
    all_ = join("all/", identity_.rank, identity_.world_size);
    has_met_.store(true, std::memory_order_release);
  }
  return *all_;
}

NcclBackend::Channel& NcclBackend::channel_to(int peer) {
  if (all_) return *all_;
  const auto found = pairs_.find(peer);
  if (found != pairs_.end()) return found->second;
  const int low = std::min(peer, identity_.rank);
  const int high = std::max(peer, identity_.rank);
  const std::string name = fmt::format("pair/{}:{}/", low, high);
  return pairs_.emplace(peer, join(name, identity_.rank == low ? 0 : 1, 2)).first->second;
}

// What is captured waits for nothing outside of its graph, and nothing outside waits for it.
void NcclBackend::order_behind_last(Channel& channel, const c10::Stream& stream, bool captures) {
  if (channel.last && channel.is_last_captured == captures) channel.last->order(stream);
  channel.is_last_captured = captures;
}

std::exception_ptr NcclBackend::finish_on(const c10::Stream& stream,
                                          const BackendCall& call) noexcept {
  if (!call.on_success) return nullptr;
  try {
    const c10::StreamGuard guard(stream);
    call.on_success();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void NcclBackend::issue_on(Channel& channel, const c10::Stream& stream, const BackendCall& call,
                           std::uint64_t sequence, Issue issue) {
  const auto use = channel.communicator->lock_for_use();
  const ncclComm_t comm = channel.communicator->get();
  if (comm == nullptr) flights_->throw_if_failed();
  const ncclResult_t result =
      issue({comm, static_cast<cudaStream_t>(stream.native_handle()), call.description});
  if (result == ncclSuccess || result == ncclInProgress) return;
  // The others may be in it: half a collective cannot be taken back.
  const std::string text = nccl_error_text(api_, result, comm);
  flights_->fail(
      {GroupFailure::Kind::Device,
       fmt::format("{} on {}: {}. Hint: NCCL_DEBUG=INFO shows what NCCL did; an error of "
                   "CUDA is that of a kernel that ran before (CUDA_LAUNCH_BLOCKING=1)",
                   call.description.to_string(sequence), call.device.str(), text)});
}

WorkPtr NcclBackend::launch(BackendCall call, at::ArrayRef<at::Tensor> tensors, Issue issue,
                            Numbering numbering, StreamWork::Wait wait) {
  const std::lock_guard lock(mutex_);
  flights_->throw_if_failed();
  use_device(call.device);
  const c10::DeviceGuard device(call.device);
  const bool is_message = numbering == Numbering::Message;
  Channel& channel = is_message && call.description.root >= 0 ? channel_to(call.description.root)
                                                              : channel_of_all();
  const std::uint64_t sequence = is_message ? 0 : ++sequence_;
  const c10::Stream caller = current_stream_on(call.device);
  const bool captures = is_capturing(caller);
  const c10::Stream stream = call.async ? channel.stream : caller;
  if (call.async) {
    channel.begin->record(caller);
    channel.begin->block(stream);
  }
  order_behind_last(channel, stream, captures);
  auto operation =
      std::make_shared<DeviceOperation>(call.description, sequence, call.timeout, events_.take());
  operation->ticket = flights_->record(call.description, sequence);
  if (!is_message) flights_->called(call.description, sequence);
  // A graph that is replayed has no time of its own for each of its operations.
  if (is_timed_ && !captures) operation->record_begin(events_.take(), stream);
  issue_on(channel, stream, call, sequence, issue);
  const std::exception_ptr error = finish_on(stream, call);
  operation->record_end(stream);
  channel.last = operation;
  if (call.async) {
    std::vector<at::Tensor> held;
    held.reserve(tensors.size() + call.results.size());
    held.insert(held.end(), tensors.begin(), tensors.end());
    held.insert(held.end(), call.results.begin(), call.results.end());
    operation->hold(std::move(held), std::move(call.on_success), caller);
  }
  auto work = std::make_shared<StreamWork>(operation, std::move(call.results), call.device, wait);
  // Who has captured it asks nobody for its end.
  if (!captures) flights_->add(channel.communicator, operation, work);
  if (error) std::rethrow_exception(error);
  return work;
}

void NcclBackend::check_reduction_of(const BackendCall& call, double scale) const {
  const std::string refusal = nccl_refusal(api_, call.description, scale, call.device);
  if (!refusal.empty()) throw ArgumentError(fmt::format("{}: {}.", where(call), refusal));
}

void NcclBackend::prepare_reduction(BackendCall& call, at::ArrayRef<at::Tensor> results,
                                    double scale) const {
  check_reduction_of(call, scale);
  const double left = scale_left(call.description.reduce_op, scale);
  if (left == 1.0) return;
  // Before whatever else the call does with the result.
  call.on_success = [results = results.vec(), left, then = std::move(call.on_success)] {
    for (const at::Tensor& result : results) at::Tensor(result).mul_(left);
    if (then) then();
  };
}

WorkPtr NcclBackend::all_reduce(BackendCall call, const at::Tensor& tensor, double scale) {
  prepare_reduction(call, tensor, scale);
  return launch(std::move(call), tensor, [&](const Launch& to) {
    const NcclReduction reduction(api_, to.comm, to.description, scale, identity_.world_size);
    return api_.all_reduce(tensor.const_data_ptr(), tensor.data_ptr(), count_of(tensor),
                           reduction.dtype(), reduction.op(), to.comm, to.stream);
  });
}

WorkPtr NcclBackend::reduce(BackendCall call, const at::Tensor& tensor, int root, double scale) {
  const bool is_root = root == identity_.rank;
  if (is_root) {
    prepare_reduction(call, tensor, scale);
  } else {
    check_reduction_of(call, scale);
  }
  return launch(std::move(call), tensor, [&](const Launch& to) {
    const NcclReduction reduction(api_, to.comm, to.description, scale, identity_.world_size);
    return api_.reduce(tensor.const_data_ptr(), is_root ? tensor.data_ptr() : nullptr,
                       count_of(tensor), reduction.dtype(), reduction.op(), root, to.comm,
                       to.stream);
  });
}

WorkPtr NcclBackend::reduce_scatter(BackendCall call, const at::Tensor& output,
                                    const at::Tensor& input, double scale) {
  prepare_reduction(call, output, scale);
  return launch(std::move(call), {output, input}, [&](const Launch& to) {
    const NcclReduction reduction(api_, to.comm, to.description, scale, identity_.world_size);
    return api_.reduce_scatter(input.const_data_ptr(), output.data_ptr(), count_of(output),
                               reduction.dtype(), reduction.op(), to.comm, to.stream);
  });
}

WorkPtr NcclBackend::broadcast(BackendCall call, const at::Tensor& tensor, int root) {
  return launch(std::move(call), tensor, [&](const Launch& to) {
    const NcclElements elements = nccl_elements(to.description.dtype, count_of(tensor));
    return api_.broadcast(tensor.const_data_ptr(), tensor.data_ptr(), elements.count,
                          elements.dtype, root, to.comm, to.stream);
  });
}

WorkPtr NcclBackend::all_gather(BackendCall call, const at::Tensor& output,
                                const at::Tensor& input) {
  return launch(std::move(call), {output, input}, [&](const Launch& to) {
    const NcclElements elements = nccl_elements(to.description.dtype, count_of(input));
    return api_.all_gather(input.const_data_ptr(), output.data_ptr(), elements.count,
                           elements.dtype, to.comm, to.stream);
  });
}

WorkPtr NcclBackend::exchange(BackendCall call, std::vector<Exchange> parts) {
  const OpKind kind = call.description.kind;
  const bool is_message = kind == OpKind::Send || kind == OpKind::Recv;
  std::vector<at::Tensor> tensors;
  for (const Exchange& part : parts) {
    if (part.peer < 0) {
      throw ArgumentError(fmt::format(
          "{}: NCCL cannot receive from any source. Hint: name the rank, or use CPU tensors.",
          where(call)));
    }
    tensors.push_back(part.tensor);
  }
  return launch(
      std::move(call), tensors, [&](const Launch& to) { return issue_parts(to, parts); },
      is_message ? Numbering::Message : Numbering::Collective);
}

ncclResult_t NcclBackend::issue_together(std::size_t count, IssueOne one) const {
  ncclResult_t result = api_.group_start();
  for (std::size_t i = 0; i < count && result == ncclSuccess; ++i) result = one(i);
  const ncclResult_t ended = api_.group_end();
  return result == ncclSuccess ? ended : result;
}

ncclResult_t NcclBackend::issue_parts(const Launch& launch,
                                      const std::vector<Exchange>& parts) const {
  // A communicator of two ranks has numbers of its own.
  const bool is_pair = !all_ || all_->communicator->get() != launch.comm;
  return issue_together(parts.size(), [&](std::size_t i) {
    const Exchange& part = parts[i];
    const int peer = !is_pair ? part.peer : part.peer < identity_.rank ? 0 : 1;
    const NcclElements elements = nccl_elements(
        wire_dtype(part.tensor.scalar_type()).value_or(Dtype::UInt8), count_of(part.tensor));
    if (elements.count == 0) return ncclSuccess;
    return part.direction == Exchange::Direction::Send
               ? api_.send(part.tensor.const_data_ptr(), elements.count, elements.dtype, peer,
                           launch.comm, launch.stream)
               : api_.recv(part.tensor.data_ptr(), elements.count, elements.dtype, peer,
                           launch.comm, launch.stream);
  });
}

WorkPtr NcclBackend::all_reduce_each(BackendCall call, std::vector<at::Tensor> tensors,
                                     double scale) {
  prepare_reduction(call, tensors, scale);
  return launch(std::move(call), tensors, [&](const Launch& to) {
    const NcclReduction reduction(api_, to.comm, to.description, scale, identity_.world_size);
    return issue_together(tensors.size(), [&](std::size_t i) {
      return api_.all_reduce(tensors[i].const_data_ptr(), tensors[i].data_ptr(),
                             count_of(tensors[i]), reduction.dtype(), reduction.op(), to.comm,
                             to.stream);
    });
  });
}

WorkPtr NcclBackend::all_gather_each(BackendCall call, std::vector<BlockPair> pairs) {
  return launch(std::move(call), tensors_of(pairs), [&](const Launch& to) {
    return issue_together(pairs.size(), [&](std::size_t i) {
      const auto& [whole, block] = pairs[i];
      const NcclElements elements = nccl_elements(to.description.dtype, count_of(block));
      return api_.all_gather(block.const_data_ptr(), whole.data_ptr(), elements.count,
                             elements.dtype, to.comm, to.stream);
    });
  });
}

WorkPtr NcclBackend::reduce_scatter_each(BackendCall call, std::vector<BlockPair> pairs,
                                         double scale) {
  std::vector<at::Tensor> results;
  for (const BlockPair& pair : pairs) results.push_back(pair.block);
  prepare_reduction(call, results, scale);
  return launch(std::move(call), tensors_of(pairs), [&](const Launch& to) {
    const NcclReduction reduction(api_, to.comm, to.description, scale, identity_.world_size);
    return issue_together(pairs.size(), [&](std::size_t i) {
      const auto& [whole, block] = pairs[i];
      return api_.reduce_scatter(whole.const_data_ptr(), block.data_ptr(), count_of(block),
                                 reduction.dtype(), reduction.op(), to.comm, to.stream);
    });
  });
}

WorkPtr NcclBackend::barrier(BackendCall call) {
  const bool async = std::exchange(call.async, true);
  if (!barrier_.defined()) {
    barrier_ = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(call.device));
  }
  WorkPtr work = launch(
      std::move(call), {barrier_},
      [&](const Launch& to) {
        return api_.all_reduce(barrier_.const_data_ptr(), barrier_.data_ptr(), 1, ncclUint8,
                               ncclMax, to.comm, to.stream);
      },
      Numbering::Collective, StreamWork::Wait::Host);
  if (!async) work->wait();
  return work;
}

at::Tensor NcclBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  if (has_met() && wants_nccl_memory()) {
    return nccl_memory(api_, all_->communicator, sizes, dtype);
  }
  return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
}

void NcclBackend::abort(const std::string& reason) noexcept {
  try {
    throw StateError(fmt::format("{}: the group was aborted: {}", identity_.where(), reason));
  } catch (const Error&) {
    const std::exception_ptr known = host_.failure();
    flights_->end_all(known ? known : std::current_exception());
  }
}

void NcclBackend::shutdown() {
  flights_->drain();
  DeviceWatchdog::get().remove(*flights_);
  const std::lock_guard lock(mutex_);
  if (flights_->failure()) return;
  for (auto& [peer, channel] : pairs_) channel.communicator->destroy();
  if (all_) all_->communicator->destroy();
}

}  // namespace libddp
