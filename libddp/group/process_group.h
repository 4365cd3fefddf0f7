#pragma once

// A group of ranks that communicate: validates, numbers, names and routes operations to a Backend.
//
// Collectives must be called by all ranks of the group in the same order. A synchronous call on an
// idle host group runs inline in the caller; `async = true` returns at once and the Work says when.
// The first failure poisons the group: every later call throws the same cause.
// Thread rule: any thread may call; calls of one group are serialised in the order they arrive.
//
//   libddp::Group group = libddp::init_process_group({});  // reads RANK, WORLD_SIZE, MASTER_*
//   at::Tensor t = group->allocate({1024}, at::kFloat);
//   group->all_reduce(t, {.op = libddp::ReduceOp::Avg});

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/reduce_op.h"
#include "libddp/group/backend.h"
#include "libddp/group/work.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace libddp {

struct ReduceOptions {
  ReduceOp op = ReduceOp::Sum;
  /// Multiplies the result (floating point dtypes only).
  double scale = 1.0;
};

struct CallOptions {
  bool async = false;
  /// nullopt = the group's.
  std::optional<std::chrono::milliseconds> timeout{};
  /// What the bytes serve; appears in errors.
  std::string_view label{};
};

class InterStageFactory;
/// Moves collectives between hosts in place of TCP links (docs/hosts.md): interop/gloo_engine.h,
/// interop/inter_engine.h.
using InterEngine = std::shared_ptr<const InterStageFactory>;

/// How a group uses libddp's links between hosts (docs/hosts.md). The same on all ranks: another
/// choice is an error that shows both.
struct LinkOptions {
  /// Connections per link, 1 to 8; nullopt = LIBDDP_SOCKETS_PER_LINK, else 1.
  std::optional<int> sockets_per_link{};
  /// What large float32 sums travel as, kFloat or kBFloat16; nullopt = LIBDDP_WIRE_DTYPE, else
  /// kFloat.
  std::optional<at::ScalarType> wire_dtype{};
};

class ProcessGroup;
using Group = std::shared_ptr<ProcessGroup>;

class ProcessGroup : public std::enable_shared_from_this<ProcessGroup> {
 public:
  struct Options {
    int rank = 0;
    int world_size = 1;
    std::string name = "world";
    std::chrono::milliseconds timeout = std::chrono::minutes(30);
    /// Rank in the first group of each member, ordered by rank here; empty = 0 .. world_size - 1.
    std::vector<int> global_ranks{};
    /// Ranks with equal texts share a host; empty = boot id and network namespace decide. For
    /// tests that simulate several hosts.
    std::string host_identity{};
    /// Null = TCP links. The same on all ranks. Groups that split() makes have it too.
    InterEngine inter{};
    /// Groups that split() makes have them too.
    LinkOptions links{};
    /// Ranks on several hosts without a run key (docs/security.md) are an error; so they are with
    /// LIBDDP_REQUIRE_KEY=1, else they start with a warning.
    bool require_key = false;
    /// How long joining may take; nullopt = `timeout`. Of this group alone, as is `look`.
    std::optional<std::chrono::milliseconds> join_timeout{};
    /// Called now and then while this rank waits for the others to join; what it throws (an Error)
    /// ends that, and is told to them.
    std::function<void()> look{};
  };

  /// Joins: every rank calls it with the same world_size and name and a store that all of them
  /// share (keys are prefixed with the name). Blocks until all have come.
  static Group create(c10::intrusive_ptr<c10d::Store> store, Options options);
  /// A group over a backend that exists already (interop/from_c10d.h).
  static Group over(std::unique_ptr<Backend> backend, Options options);
  /// From now on `backend` moves the tensors of an accelerator, in place of the one that the group
  /// would make. Throws StateError where it has one.
  void use_for_devices(std::unique_ptr<Backend> backend);
  /// Makes what operations on tensors of `device` need now, which the first of them would do else.
  /// A collective; nothing for the CPU.
  void connect(c10::Device device);
  /// Whether it has one for an accelerator's tensors; one that it makes itself comes with the first
  /// of them.
  bool has_device_backend() const;
  /// Whether it can move tensors on devices of `type`.
  bool moves(c10::DeviceType type) const;
  ~ProcessGroup();

  int rank() const;
  int size() const;
  const std::string& name() const;
  const std::vector<int>& global_ranks() const;
  std::string backend_name() const;
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);
  /// Number of collectives issued so far.
  std::uint64_t sequence_number() const;

  // Tensors: strided, of one call on one device, CPU or CUDA (docs/gpu.md); non-contiguous ones are
  // handled by a copy where torch accepts them and are refused where it would be ambiguous. Shapes
  // and dtypes must be equal on all ranks unless said otherwise. Every call returns a Work (already
  // done unless options.async). Raises: ArgumentError (before any byte moves), PeerError,
  // TimeoutError, StateError.

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOptions reduce = {}, CallOptions options = {});
  /// One collective over several tensors of one dtype.
  WorkPtr all_reduce_coalesced(const std::vector<at::Tensor>& tensors, ReduceOptions reduce = {},
                               CallOptions options = {});
  /// The result is defined on `root` only.
  WorkPtr reduce(const at::Tensor& tensor, int root, ReduceOptions reduce = {},
                 CallOptions options = {});
  WorkPtr broadcast(const at::Tensor& tensor, int root, CallOptions options = {});
  /// `output`: [world_size * d0, ...] (cat) or [world_size, d0, ...] (stack) for input [d0, ...].
  WorkPtr all_gather_into(const at::Tensor& output, const at::Tensor& input,
                          CallOptions options = {});
  /// The same of several tensors of one dtype, each with a size of its own: one operation, without
  /// a copy where the backend takes lists (NCCL), else by way of one packed tensor.
  WorkPtr all_gather_into_coalesced(const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs,
                                    CallOptions options = {});
  /// One output per rank, which may differ in size (each rank's own input size).
  WorkPtr all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                     CallOptions options = {});
  /// `outputs` empty except on `root`.
  WorkPtr gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root,
                 CallOptions options = {});
  /// `inputs` empty except on `root`.
  WorkPtr scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                  CallOptions options = {});
  /// `input`: [world_size * d0, ...] or [world_size, d0, ...] for output [d0, ...].
  WorkPtr reduce_scatter_into(const at::Tensor& output, const at::Tensor& input,
                              ReduceOptions reduce = {}, CallOptions options = {});
  /// As all_gather_into_coalesced.
  WorkPtr reduce_scatter_into_coalesced(const std::vector<at::Tensor>& outputs,
                                        const std::vector<at::Tensor>& inputs,
                                        ReduceOptions reduce = {}, CallOptions options = {});
  /// One input per rank (sizes may differ between ranks' blocks).
  WorkPtr reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                         ReduceOptions reduce = {}, CallOptions options = {});
  WorkPtr all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                     CallOptions options = {});
  /// Splits are rows of dim 0 per rank; empty = even.
  WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<std::int64_t>& output_splits,
                            const std::vector<std::int64_t>& input_splits,
                            CallOptions options = {});
  WorkPtr send(const at::Tensor& tensor, int target, int tag = 0, CallOptions options = {});
  /// `source` nullopt = any; Work::source_rank tells.
  WorkPtr recv(const at::Tensor& tensor, std::optional<int> source, int tag = 0,
               CallOptions options = {});
  /// A batch of sends and receives that runs as a whole.
  WorkPtr exchange(std::vector<Exchange> parts, CallOptions options = {});
  WorkPtr barrier(CallOptions options = {});

  /// Uninitialised tensor in the group's arena: its collectives copy nothing. On a device: in
  /// memory that the group's communicator knows, where it has such.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat,
                      c10::Device device = c10::kCPU);
  /// One tensor that all ranks have in common: what one writes the others see, after a collective
  /// that both take part in. A collective (sizes and dtype alike on all ranks); uninitialised.
  /// Undefined where the ranks are not on one host or the backend has no such memory.
  at::Tensor allocate_shared(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat,
                             CallOptions options = {});
  /// Whether a contiguous tensor lies there.
  bool is_in_arena(const at::Tensor& tensor) const;

  /// A group of some of this group's ranks (in `ranks` order). Collective over those ranks only;
  /// null on a rank that is not among them.
  Group split(const std::vector<int>& ranks, const std::string& name);

  /// Ends every operation in flight on this rank and, at once, on the others.
  void abort(const std::string& reason);
  /// This rank met an error (`what`: "in forward: ...") and may stay away from collectives that the
  /// others are in. Peers that wait for it raise `what` after a moment (250 ms), unless its next
  /// collective or retract_error() takes it back meanwhile, or they announced the same
  /// themselves after the same number of collectives. Nothing happens where nobody waits.
  void report_error(const std::string& what) noexcept;
  void retract_error() noexcept;
  /// The last 2,048 operations as JSON, and what the group failed of: docs/failures.md. Any time,
  /// also after a failure.
  std::string flight_log() const;
  /// Nanoseconds that this rank has spent in long waits of collectives so far, by the rank that
  /// came last (ranks of this host; those of others count nothing). Fills `by_rank`.
  void waits(std::vector<std::int64_t>& by_rank) const;
  /// Null while the group is healthy; StateError once it has retired.
  std::exception_ptr failure() const;
  /// Leaves in order, once what is in flight has ended; messages that a peer which leaves as well
  /// has no part of fail. Later calls throw StateError. The destructor does the same where nothing
  /// is in flight and no exception is on its way; else the peers take it for a failure.
  void shutdown();
  /// Leaves because the members go on in another group, of which `reason` tells: later calls throw
  /// StateError with it. What is in flight here fails at once; where nothing is, this rank leaves
  /// in order, so that peers which are still in the last operation finish it.
  void retire(const std::string& reason);

 private:
  struct State;
  explicit ProcessGroup(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace libddp
