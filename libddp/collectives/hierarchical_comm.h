#pragma once

// Collectives and messages between the ranks of one group on several hosts: shared memory inside a
// host; TCP connections between hosts, or another stage for the collectives (inter_stage.h).
//
// A collective goes through three stages: the ranks of each host reduce or gather among themselves;
// leader c of each host (host_layout.h) exchanges slice c with leader c of the others, so that
// all ranks' cores and connections work; the ranks of each host share what has come. Small payloads
// skip the slices; a large all-reduce sends pieces of a slice while the host's ranks reduce the
// next. A reduce-scatter sends each host the sums of that host's blocks only. bf16 and fp16: the
// sum of a host and the sum over hosts each accumulate in fp32 and are rounded once.
//
// Thread rule: as Comm.
//
//   HierarchicalComm comm({.rank = 2, .layout = layout, .local = ..., .peers = ...});
//   comm.all_reduce(call, data, 1.0);

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/comm.h"
#include "libddp/collectives/inter_stage.h"
#include "libddp/collectives/link_messages.h"
#include "libddp/collectives/link_stage.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/memory/arena.h"
#include "libddp/transport/host_layout.h"
#include "libddp/transport/link_settings.h"

namespace libddp {

/// Where a rank stands between the hosts.
struct InterPlace {
  int host = 0;
  int num_hosts = 1;
  /// Number of the leader among those of its host.
  int leader = 0;
};

/// Makes the stage between hosts of a leader. `links` is the one over TCP, which it may use or
/// drop; `local` outlives it.
using InterStageMaker = std::function<std::unique_ptr<InterStage>(
    ShmComm& local, InterPlace place, std::unique_ptr<InterStage> links)>;

struct HierarchicalCommOptions {
  int rank = 0;
  HostLayout layout;
  std::shared_ptr<Arena> arena;
  /// The communicator of this host's ranks, with their numbers in the group.
  std::unique_ptr<ShmComm> local;
  /// The leaders of this rank's number on the other hosts, by host; none for a rank that is no
  /// leader.
  std::vector<LinkPeer> leaders;
  /// All ranks of other hosts.
  std::vector<LinkMessagesPeer> message_peers;
  LinkSettings link;
  /// Empty: TCP links.
  InterStageMaker make_stage;
};

class HierarchicalComm : public Comm {
 public:
  explicit HierarchicalComm(HierarchicalCommOptions options);

  std::string name() const override { return "hosts"; }
  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(layout_.host_of.size()); }

  void all_reduce(const CommCall& call, void* data, double scale) override;
  void reduce_scatter(const CommCall& call, const void* input, void* output,
                      std::uint64_t output_count, double scale) override;
  void all_gather(const CommCall& call, const void* input, void* output,
                  std::uint64_t input_bytes) override;
  bool all_to_all(const CommCall& /*call*/, const void* /*input*/, void* /*output*/,
                  std::uint64_t /*block_bytes*/) override {
    return false;
  }
  void broadcast(const CommCall& call, void* data, std::uint64_t bytes, int root) override;
  void barrier(const CommCall& call) override;

  bool progress(const std::vector<Transfer*>& transfers) override {
    return mailbox_.progress(transfers);
  }
  std::uint32_t mail_ticket() const override { return local_->mail_ticket(); }
  void wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit) override {
    local_->wait_for_mail(ticket, limit);
  }
  void wake_mail() noexcept override { local_->wake_mail(); }
  void finish_messages() noexcept override { links_.finish(); }
  bool has_read_all(int rank) const override { return links_.has_read_all(rank); }
  int network_fd() const override { return links_.network_fd(); }
  void on_network() noexcept override { links_.on_network(); }
  std::optional<GroupFailure> look_at_network(std::int64_t now_ns) override;

  void fail(GroupFailure failure) noexcept override { local_->fail(std::move(failure)); }
  std::optional<GroupFailure> failure() const override { return local_->failure(); }
  void throw_if_failed(const CommCall* call = nullptr) const override {
    local_->throw_if_failed(call);
  }
  std::string last_call_of(int rank) const override;
  std::optional<std::uint64_t> last_sequence_of(int rank) const override;
  void add_waits(std::vector<std::int64_t>& by_rank) const override { local_->add_waits(by_rank); }
  void beat() noexcept override { local_->beat(); }
  std::optional<std::uint64_t> beats_of(int rank) const override;

 private:
  /// `call` with the patience of the stage that follows the network.
  static CommCall last_stage(const CommCall& call);
  /// What a host does by itself: averages divide once, at the end.
  static ReduceOp first_op(ReduceOp op) { return op == ReduceOp::Avg ? ReduceOp::Sum : op; }

  void reduce_all(const CommCall& call, std::byte* data, std::uint64_t count, double scale);
  void reduce_in_pieces(const CommCall& call, std::byte* data, std::uint64_t count, double scale);
  bool pays_in_pieces(std::uint64_t bytes) const;
  /// A reduce-scatter: its blocks, and what each is to become.
  struct Scatter {
    const std::byte* input;
    std::byte* output;
    std::uint64_t count;
    std::uint64_t block_bytes;
    double scale;
  };
  void scatter_small(const CommCall& call, const Scatter& scatter);
  void scatter_even(const CommCall& call, const Scatter& scatter);
  void scatter_uneven(const CommCall& call, const Scatter& scatter);
  std::shared_ptr<std::byte> in_host_order(const Scatter& scatter) const;
  bool carries(std::uint64_t bytes) const;
  std::vector<std::uint64_t> slice_edges(std::uint64_t count, std::size_t element) const;
  void share(const CommCall& call, std::byte* data, std::uint64_t count, std::size_t element);
  void gather_regions(const CommCall& call, const std::vector<InterStage::Region>& regions);
  std::vector<InterStage::Region> regions_in(std::byte* data, std::uint64_t block_bytes) const;
  bool is_host_major() const;

  const int rank_;
  const HostLayout layout_;
  const int host_;
  const int index_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<ShmComm> local_;
  std::unique_ptr<InterStage> stage_;
  LinkMessages links_;
  Mailbox mailbox_;
};

}  // namespace libddp
