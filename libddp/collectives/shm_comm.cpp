#include "libddp/collectives/shm_comm.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/shm_collectives.h"
#include "libddp/collectives/shm_core.h"
#include "libddp/collectives/slice_reduction.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_kernels.h"

namespace libddp {

struct ShmComm::State {
  explicit State(ShmCommOptions options) : core(std::move(options)), mail(core) {}

  ShmCore core;
  Mailbox mail;
};

namespace {

Reduction reduction_of(const CommCall& call, double scale) {
  check_reduction(call, scale);
  return {call.description.dtype, call.description.reduce_op, scale};
}

// What a reduction over one rank is: the scale.
void reduce_alone(const Reduction& reduction, const std::byte* input, std::byte* output,
                  std::size_t count) {
  if (reduction.scale == 1.0) {
    return copy_bytes(output, input, count * element_bytes(reduction.dtype));
  }
  reduce({.dtype = reduction.dtype,
          .op = reduction.op,
          .count = count,
          .sources = &input,
          .num_sources = 1,
          .destinations = &output,
          .num_destinations = 1,
          .scale = reduction.scale});
}

}  // namespace

void check_reduction(const CommCall& call, double scale) {
  const OpDescription& description = call.description;
  const bool is_valid = reducible(description.dtype, description.reduce_op) &&
                        (scale == 1.0 || scalable(description.dtype));
  if (is_valid) return;
  throw ArgumentError(fmt::format(
      "libddp {}: {} with scale {} is not defined for {}. Hint: AVG and scales need floating "
      "types, BAND, BOR and BXOR integers or bool.",
      description.to_string(call.sequence), name(description.reduce_op), scale,
      name(description.dtype)));
}

ShmComm::ShmComm(ShmCommOptions options) : state_(std::make_unique<State>(std::move(options))) {}

ShmComm::~ShmComm() = default;

SharedSegment ShmComm::create_page(const std::string& group_name, int world_size) {
  return ShmPage::create(group_name, world_size);
}

std::string ShmComm::own_cpu_mask() { return own_cpu_mask_text(); }

std::string ShmComm::layout() { return ShmPage::layout(); }

int ShmComm::rank() const { return state_->core.group_rank(state_->core.rank()); }

int ShmComm::world_size() const { return state_->core.world_size(); }

void ShmComm::all_reduce(const CommCall& call, void* data, double scale) {
  const Reduction reduction = reduction_of(call, scale);
  ShmCore& core = state_->core;
  auto* bytes = static_cast<std::byte*>(data);
  core.begin(call);
  if (core.world_size() == 1) return reduce_alone(reduction, bytes, bytes, call.description.count);
  libddp::all_reduce(core, reduction, bytes, call.description.count);
}

void ShmComm::reduce_scatter(const CommCall& call, const void* input, void* output,
                             std::uint64_t output_count, double scale) {
  const Reduction reduction = reduction_of(call, scale);
  ShmCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() == 1) return reduce_alone(reduction, from, to, output_count);
  libddp::reduce_scatter(core, reduction, from, to, output_count);
}

void ShmComm::all_gather(const CommCall& call, const void* input, void* output,
                         std::uint64_t input_bytes) {
  ShmCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() == 1) return copy_bytes(to, from, input_bytes);
  libddp::all_gather(core, from, to, input_bytes);
}

bool ShmComm::all_to_all(const CommCall& call, const void* input, void* output,
                         std::uint64_t block_bytes) {
  ShmCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() > 1) libddp::all_to_all(core, from, to, block_bytes);
  return true;
}

void ShmComm::broadcast(const CommCall& call, void* data, std::uint64_t bytes, int root) {
  ShmCore& core = state_->core;
  core.begin(call);
  if (core.world_size() == 1) return;
  libddp::broadcast(core, static_cast<std::byte*>(data), bytes, root);
}

void ShmComm::reduce_here(const CommCall& call, Dtype dtype, ReduceOp op, void* data,
                          std::uint64_t count) {
  ShmCore& core = state_->core;
  core.begin(call);
  if (core.world_size() == 1) return;
  libddp::all_reduce(core, {dtype, op, 1.0}, static_cast<std::byte*>(data), count);
}

std::unique_ptr<Preparation> ShmComm::reduce_slices_here(const CommCall& call, Dtype dtype,
                                                         ReduceOp op, void* data,
                                                         std::vector<std::uint64_t> edges,
                                                         std::vector<std::uint64_t> starts) {
  ShmCore& core = state_->core;
  core.begin(call);
  return std::make_unique<SliceReduction>(core, Reduction{dtype, op, 1.0},
                                          static_cast<std::byte*>(data), std::move(edges),
                                          std::move(starts));
}

void ShmComm::reduce_scatter_here(const CommCall& call, Dtype dtype, ReduceOp op, const void* input,
                                  void* output, std::uint64_t output_count) {
  const Reduction reduction{dtype, op, 1.0};
  ShmCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() == 1) return reduce_alone(reduction, from, to, output_count);
  libddp::reduce_scatter(core, reduction, from, to, output_count);
}

void ShmComm::share_slices(const CommCall& call, void* data,
                           const std::vector<std::uint64_t>& edges) {
  ShmCore& core = state_->core;
  core.begin(call, ShmCore::Stage::Last);
  if (core.world_size() > 1) libddp::share_slices(core, static_cast<std::byte*>(data), edges);
}

void ShmComm::meet_again(const CommCall& call) {
  ShmCore& core = state_->core;
  core.begin(call, ShmCore::Stage::Last);
  if (core.world_size() > 1) core.barrier();
}

WaitLedger& ShmComm::waits() { return state_->core.waits(); }

void ShmComm::show_delay(Delay delay) { state_->core.show_delay(delay); }

void ShmComm::barrier(const CommCall& call) {
  ShmCore& core = state_->core;
  core.begin(call);
  if (core.world_size() > 1) core.barrier();
}

void ShmComm::send(const CommCall& call, const void* data, std::uint64_t bytes, int target,
                   int tag) {
  // The mail never writes through the pointer of a send.
  Transfer part{.is_send = true,
                .peer = target,
                .tag = tag,
                .data = const_cast<void*>(data),
                .bytes = bytes,
                .description = call.description};
  state_->mail.run(call, {&part, 1});
}

int ShmComm::recv(const CommCall& call, void* data, std::uint64_t bytes, int source, int tag) {
  Transfer part{
      .peer = source, .tag = tag, .data = data, .bytes = bytes, .description = call.description};
  state_->mail.run(call, {&part, 1});
  return part.source;
}

void ShmComm::exchange(const CommCall& call, std::vector<Transfer> transfers) {
  state_->mail.run(call, transfers);
}

bool ShmComm::progress(const std::vector<Transfer*>& transfers) {
  return state_->mail.progress(transfers);
}

std::uint32_t ShmComm::mail_ticket() const { return state_->mail.ticket(); }

void ShmComm::wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit) {
  state_->mail.wait(ticket, limit);
}

void ShmComm::wake_mail() noexcept { state_->mail.wake_own(); }

void ShmComm::fail(CommFailure failure) noexcept { state_->core.fail(std::move(failure)); }

std::optional<CommFailure> ShmComm::failure() const {
  const CommFailure* failure = state_->core.failure();
  return failure ? std::optional(*failure) : std::nullopt;
}

void ShmComm::throw_if_failed(const CommCall* call) const { state_->core.throw_if_failed(call); }

std::byte* ShmComm::memory_of(int rank, std::uint64_t offset, std::uint64_t bytes) {
  return state_->core.reach(nullptr, state_->core.index_of(rank), offset, bytes);
}

std::string ShmComm::last_call_of(int rank) const {
  return state_->core.last_call_of(state_->core.index_of(rank));
}

std::optional<std::uint64_t> ShmComm::last_sequence_of(int rank) const {
  return state_->core.last_sequence_of(state_->core.index_of(rank));
}

void ShmComm::add_waits(std::vector<std::int64_t>& by_rank) const {
  const WaitLedger& waits = std::as_const(state_->core).waits();
  for (int rank = 0; rank < static_cast<int>(by_rank.size()); ++rank) {
    by_rank[static_cast<std::size_t>(rank)] += waits.total_ns(rank);
  }
}

void ShmComm::beat() noexcept {
  state_->core.page(state_->core.rank()).beats().fetch_add(1, std::memory_order_relaxed);
}

std::optional<std::uint64_t> ShmComm::beats_of(int rank) const {
  const int index = state_->core.index_of(rank);
  return state_->core.page(index).beats().load(std::memory_order_relaxed);
}

}  // namespace libddp
