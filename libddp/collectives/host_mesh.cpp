#include "libddp/collectives/host_mesh.h"

#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/collectives/host_collectives.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/mesh_core.h"
#include "libddp/collectives/slice_reduction.h"
#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/reduce_kernels.h"

namespace libddp {

struct HostMesh::State {
  explicit State(HostMeshOptions options) : core(std::move(options)), mail(core) {}

  MeshCore core;
  Mailbox mail;
};

namespace {

Reduction reduction_of(const MeshCall& call, double scale) {
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

void check_reduction(const MeshCall& call, double scale) {
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

HostMesh::HostMesh(HostMeshOptions options) : state_(std::make_unique<State>(std::move(options))) {}

HostMesh::~HostMesh() = default;

SharedSegment HostMesh::create_page(const std::string& group_name, int world_size) {
  return HostPage::create(group_name, world_size);
}

std::string HostMesh::own_cpu_mask() { return own_cpu_mask_text(); }

std::string HostMesh::layout() { return HostPage::layout(); }

int HostMesh::rank() const { return state_->core.group_rank(state_->core.rank()); }

int HostMesh::world_size() const { return state_->core.world_size(); }

void HostMesh::all_reduce(const MeshCall& call, void* data, double scale) {
  const Reduction reduction = reduction_of(call, scale);
  MeshCore& core = state_->core;
  auto* bytes = static_cast<std::byte*>(data);
  core.begin(call);
  if (core.world_size() == 1) return reduce_alone(reduction, bytes, bytes, call.description.count);
  libddp::all_reduce(core, reduction, bytes, call.description.count);
}

void HostMesh::reduce_scatter(const MeshCall& call, const void* input, void* output,
                              std::uint64_t output_count, double scale) {
  const Reduction reduction = reduction_of(call, scale);
  MeshCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() == 1) return reduce_alone(reduction, from, to, output_count);
  libddp::reduce_scatter(core, reduction, from, to, output_count);
}

void HostMesh::all_gather(const MeshCall& call, const void* input, void* output,
                          std::uint64_t input_bytes) {
  MeshCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() == 1) return copy_bytes(to, from, input_bytes);
  libddp::all_gather(core, from, to, input_bytes);
}

bool HostMesh::all_to_all(const MeshCall& call, const void* input, void* output,
                          std::uint64_t block_bytes) {
  MeshCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() > 1) libddp::all_to_all(core, from, to, block_bytes);
  return true;
}

void HostMesh::broadcast(const MeshCall& call, void* data, std::uint64_t bytes, int root) {
  MeshCore& core = state_->core;
  core.begin(call);
  if (core.world_size() == 1) return;
  libddp::broadcast(core, static_cast<std::byte*>(data), bytes, root);
}

void HostMesh::reduce_here(const MeshCall& call, Dtype dtype, ReduceOp op, void* data,
                           std::uint64_t count) {
  MeshCore& core = state_->core;
  core.begin(call);
  if (core.world_size() == 1) return;
  libddp::all_reduce(core, {dtype, op, 1.0}, static_cast<std::byte*>(data), count);
}

std::unique_ptr<Preparation> HostMesh::reduce_slices_here(const MeshCall& call, Dtype dtype,
                                                          ReduceOp op, void* data,
                                                          std::vector<std::uint64_t> edges,
                                                          std::vector<std::uint64_t> starts) {
  MeshCore& core = state_->core;
  core.begin(call);
  return std::make_unique<SliceReduction>(core, Reduction{dtype, op, 1.0},
                                          static_cast<std::byte*>(data), std::move(edges),
                                          std::move(starts));
}

void HostMesh::reduce_scatter_here(const MeshCall& call, Dtype dtype, ReduceOp op,
                                   const void* input, void* output, std::uint64_t output_count) {
  const Reduction reduction{dtype, op, 1.0};
  MeshCore& core = state_->core;
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  core.begin(call);
  if (core.world_size() == 1) return reduce_alone(reduction, from, to, output_count);
  libddp::reduce_scatter(core, reduction, from, to, output_count);
}

void HostMesh::share_slices(const MeshCall& call, void* data,
                            const std::vector<std::uint64_t>& edges) {
  MeshCore& core = state_->core;
  core.begin(call, MeshCore::Stage::Last);
  if (core.world_size() > 1) libddp::share_slices(core, static_cast<std::byte*>(data), edges);
}

void HostMesh::meet_again(const MeshCall& call) {
  MeshCore& core = state_->core;
  core.begin(call, MeshCore::Stage::Last);
  if (core.world_size() > 1) core.meet();
}

WaitLedger& HostMesh::waits() { return state_->core.waits(); }

void HostMesh::show_delay(Delay delay) { state_->core.show_delay(delay); }

void HostMesh::barrier(const MeshCall& call) {
  MeshCore& core = state_->core;
  core.begin(call);
  if (core.world_size() > 1) core.meet();
}

void HostMesh::send(const MeshCall& call, const void* data, std::uint64_t bytes, int target,
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

int HostMesh::recv(const MeshCall& call, void* data, std::uint64_t bytes, int source, int tag) {
  Transfer part{
      .peer = source, .tag = tag, .data = data, .bytes = bytes, .description = call.description};
  state_->mail.run(call, {&part, 1});
  return part.source;
}

void HostMesh::exchange(const MeshCall& call, std::vector<Transfer> transfers) {
  state_->mail.run(call, transfers);
}

bool HostMesh::progress(const std::vector<Transfer*>& transfers) {
  return state_->mail.progress(transfers);
}

std::uint32_t HostMesh::mail_ticket() const { return state_->mail.ticket(); }

void HostMesh::wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit) {
  state_->mail.wait(ticket, limit);
}

void HostMesh::wake_mail() noexcept { state_->mail.wake_own(); }

void HostMesh::fail(MeshFailure failure) noexcept { state_->core.fail(std::move(failure)); }

std::optional<MeshFailure> HostMesh::failure() const {
  const MeshFailure* failure = state_->core.failure();
  return failure ? std::optional(*failure) : std::nullopt;
}

void HostMesh::throw_if_failed(const MeshCall* call) const { state_->core.throw_if_failed(call); }

std::byte* HostMesh::memory_of(int rank, std::uint64_t offset, std::uint64_t bytes) {
  return state_->core.reach(nullptr, state_->core.index_of(rank), offset, bytes);
}

std::string HostMesh::last_call_of(int rank) const {
  return state_->core.last_call_of(state_->core.index_of(rank));
}

std::optional<std::uint64_t> HostMesh::last_sequence_of(int rank) const {
  return state_->core.last_sequence_of(state_->core.index_of(rank));
}

void HostMesh::add_waits(std::vector<std::int64_t>& by_rank) const {
  const WaitLedger& waits = std::as_const(state_->core).waits();
  for (int rank = 0; rank < static_cast<int>(by_rank.size()); ++rank) {
    by_rank[static_cast<std::size_t>(rank)] += waits.total_ns(rank);
  }
}

void HostMesh::beat() noexcept {
  state_->core.page(state_->core.rank()).beats().fetch_add(1, std::memory_order_relaxed);
}

std::optional<std::uint64_t> HostMesh::beats_of(int rank) const {
  const int index = state_->core.index_of(rank);
  return state_->core.page(index).beats().load(std::memory_order_relaxed);
}

}  // namespace libddp
