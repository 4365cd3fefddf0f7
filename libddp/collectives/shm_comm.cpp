#include "libddp/collectives/shm_comm.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/shm_collectives.h"
#include "libddp/collectives/shm_core.h"
#include "libddp/collectives/shm_messages.h"
#include "libddp/collectives/slice_reduction.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_kernels.h"

namespace libddp {

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

ShmComm::ShmComm(ShmCommOptions options)
    : core_(std::make_unique<ShmCore>(std::move(options))),
      messages_(std::make_unique<ShmMessages>(core_->peers(), core_->failure(), core_->policy())),
      mailbox_(std::make_unique<Mailbox>(*this, std::vector<MessageTransport*>{messages_.get()})) {}

ShmComm::~ShmComm() = default;

SharedSegment ShmComm::create_page(const std::string& group_name, int world_size) {
  return ShmPage::create(group_name, world_size);
}

std::string ShmComm::own_cpu_mask() { return own_cpu_mask_text(); }

std::string ShmComm::layout() { return ShmPage::layout(); }

int ShmComm::rank() const { return core_->peers().group_rank(core_->rank()); }

int ShmComm::world_size() const { return core_->world_size(); }

void ShmComm::all_reduce(const CommCall& call, void* data, double scale) {
  const Reduction reduction = reduction_of(call, scale);
  auto* bytes = static_cast<std::byte*>(data);
  core_->begin(call);
  if (core_->world_size() == 1)
    return reduce_alone(reduction, bytes, bytes, call.description.count);
  libddp::all_reduce(*core_, reduction, bytes, call.description.count);
}

void ShmComm::reduce_scatter(const CommCall& call, const void* input, void* output,
                             std::uint64_t output_count, double scale) {
  const Reduction reduction = reduction_of(call, scale);
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core_->begin(call);
  if (core_->world_size() == 1) return reduce_alone(reduction, from, to, output_count);
  libddp::reduce_scatter(*core_, reduction, from, to, output_count);
}

void ShmComm::all_gather(const CommCall& call, const void* input, void* output,
                         std::uint64_t input_bytes) {
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core_->begin(call);
  if (core_->world_size() == 1) return copy_bytes(to, from, input_bytes);
  libddp::all_gather(*core_, from, to, input_bytes);
}

bool ShmComm::all_to_all(const CommCall& call, const void* input, void* output,
                         std::uint64_t block_bytes) {
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core_->begin(call);
  if (core_->world_size() > 1) libddp::all_to_all(*core_, from, to, block_bytes);
  return true;
}

void ShmComm::broadcast(const CommCall& call, void* data, std::uint64_t bytes, int root) {
  core_->begin(call);
  if (core_->world_size() == 1) return;
  libddp::broadcast(*core_, static_cast<std::byte*>(data), bytes, root);
}

void ShmComm::reduce_here(const CommCall& call, Dtype dtype, ReduceOp op, void* data,
                          std::uint64_t count) {
  core_->begin(call);
  if (core_->world_size() == 1) return;
  libddp::all_reduce(*core_, {dtype, op, 1.0}, static_cast<std::byte*>(data), count);
}

std::unique_ptr<Preparation> ShmComm::reduce_slices_here(const CommCall& call, Dtype dtype,
                                                         ReduceOp op, void* data,
                                                         std::vector<std::uint64_t> edges,
                                                         std::vector<std::uint64_t> starts) {
  core_->begin(call);
  return std::make_unique<SliceReduction>(*core_, Reduction{dtype, op, 1.0},
                                          static_cast<std::byte*>(data), std::move(edges),
                                          std::move(starts));
}

void ShmComm::reduce_scatter_here(const CommCall& call, Dtype dtype, ReduceOp op, const void* input,
                                  void* output, std::uint64_t output_count) {
  const Reduction reduction{dtype, op, 1.0};
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core_->begin(call);
  if (core_->world_size() == 1) return reduce_alone(reduction, from, to, output_count);
  libddp::reduce_scatter(*core_, reduction, from, to, output_count);
}

void ShmComm::share_slices(const CommCall& call, void* data,
                           const std::vector<std::uint64_t>& edges) {
  core_->begin(call, ShmCore::Stage::Last);
  if (core_->world_size() > 1) libddp::share_slices(*core_, static_cast<std::byte*>(data), edges);
}

void ShmComm::meet_again(const CommCall& call) {
  core_->begin(call, ShmCore::Stage::Last);
  if (core_->world_size() > 1) core_->barrier();
}

WaitLedger& ShmComm::waits() { return core_->waits(); }

void ShmComm::show_delay(Delay delay) { core_->peers().show_delay(delay); }

void ShmComm::barrier(const CommCall& call) {
  core_->begin(call);
  if (core_->world_size() > 1) core_->barrier();
}

MessageTransport& ShmComm::messages() { return *messages_; }

bool ShmComm::progress(const std::vector<Transfer*>& transfers) {
  return mailbox_->progress(transfers);
}

std::uint32_t ShmComm::mail_ticket() const { return messages_->ticket(); }

void ShmComm::wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit) {
  messages_->wait(ticket, limit);
}

void ShmComm::wake_mail() noexcept { messages_->wake_own(); }

void ShmComm::fail(GroupFailure failure) noexcept { core_->failure().fail(std::move(failure)); }

std::optional<GroupFailure> ShmComm::failure() const {
  const GroupFailure* failure = core_->failure().get();
  return failure ? std::optional(*failure) : std::nullopt;
}

void ShmComm::throw_if_failed(const CommCall* call) const {
  core_->failure().throw_if_failed(call);
}

std::byte* ShmComm::memory_of(int rank, std::uint64_t offset, std::uint64_t bytes) {
  return core_->failure().reach(nullptr, core_->peers().index_of(rank), offset, bytes);
}

std::string ShmComm::last_call_of(int rank) const {
  return core_->peers().last_call_of(core_->peers().index_of(rank));
}

std::optional<std::uint64_t> ShmComm::last_sequence_of(int rank) const {
  return core_->peers().last_sequence_of(core_->peers().index_of(rank));
}

void ShmComm::add_waits(std::vector<std::int64_t>& by_rank) const {
  const WaitLedger& waits = core_->waits();
  for (int rank = 0; rank < static_cast<int>(by_rank.size()); ++rank) {
    by_rank[static_cast<std::size_t>(rank)] += waits.total_ns(rank);
  }
}

void ShmComm::beat() noexcept {
  core_->peers().page(core_->rank()).beats().fetch_add(1, std::memory_order_relaxed);
}

std::optional<std::uint64_t> ShmComm::beats_of(int rank) const {
  const int index = core_->peers().index_of(rank);
  return core_->peers().page(index).beats().load(std::memory_order_relaxed);
}

}  // namespace libddp
