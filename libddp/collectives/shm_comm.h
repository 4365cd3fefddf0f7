#pragma once

// Collectives between the ranks of one group on one host, over memory that all of them map.
// Bytes in, bytes out: no tensors, no threads, no store.
//
// Words: *page* = the control page of a rank (slots with stamps, inline payload, staging, mail);
// *barrier* = every rank has posted its slot for this sequence number and seen everyone else's;
// *slice* = the part of the buffer that a rank owns: it reduces its slice from all ranks' memory
// and stores the result into all ranks' memory ("slice-owner pass").
//
// Memory in the arena is read and written in place by the peers; other memory goes through the
// staging buffers in few large chunks; small payloads travel inside the slot (one barrier).
// Reductions run in rank order with fp32 accumulation for bf16 and fp16: results are bit-identical
// on every rank and from run to run, and for float32 sums on 2 ranks equal torch's.
//
// Waiting: a short spin only while the ranks have free cores, then a futex; every wait has a
// deadline. `fail` (from any thread) wakes all waiters; the first failure is kept and every later
// call throws the same cause.
//
// Thread rule: collectives of one communicator run one at a time, in the same order on all ranks
// (the caller serialises); `fail` and `failure` may come from any thread at any time; messages are
// moved by one thread at a time.
//
//   ShmComm comm({.rank = 0, .world_size = 2, .group_name = "world", .arena = arena}, ...);
//   comm.all_reduce(call, data);

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/dtype.h"
#include "libddp/collectives/comm.h"
#include "libddp/collectives/shm_options.h"
#include "libddp/collectives/wait_ledger.h"

namespace libddp {

class Mailbox;
class MessageTransport;
class Preparation;
class ShmCore;
class ShmMessages;

class ShmComm : public Comm {
 public:
  explicit ShmComm(ShmCommOptions options);
  ~ShmComm() override;
  ShmComm(const ShmComm&) = delete;
  ShmComm& operator=(const ShmComm&) = delete;

  /// The control page that a rank makes before the bootstrap and passes to its peers.
  static SharedSegment create_page(const std::string& group_name, int world_size);
  /// This process's CPUs as text for ShmMember::cpu_mask.
  static std::string own_cpu_mask();
  /// Layout version and sizes: ranks with different ones must not form a communicator.
  static std::string layout();

  std::string name() const override { return "host"; }
  int rank() const override;
  int world_size() const override;

  void all_reduce(const CommCall& call, void* data, double scale = 1.0) override;
  void reduce_scatter(const CommCall& call, const void* input, void* output,
                      std::uint64_t output_count, double scale = 1.0) override;
  void all_gather(const CommCall& call, const void* input, void* output,
                  std::uint64_t input_bytes) override;
  bool all_to_all(const CommCall& call, const void* input, void* output,
                  std::uint64_t block_bytes) override;
  void broadcast(const CommCall& call, void* data, std::uint64_t bytes, int root) override;
  void barrier(const CommCall& call) override;

  // Stages of a collective over several hosts; in place, `call` is the whole collective's.
  /// The sum (or other op) over the ranks of this host, the same on all of them.
  void reduce_here(const CommCall& call, Dtype dtype, ReduceOp op, void* data, std::uint64_t count);
  /// The same in pieces, of the own slice only; see SliceReduction for the arguments.
  std::unique_ptr<Preparation> reduce_slices_here(const CommCall& call, Dtype dtype, ReduceOp op,
                                                  void* data, std::vector<std::uint64_t> edges,
                                                  std::vector<std::uint64_t> starts);
  /// `input` holds a block of `output_count` elements per rank of this host; the own one's sum (or
  /// other op) goes to `output`, which may be the own block.
  void reduce_scatter_here(const CommCall& call, Dtype dtype, ReduceOp op, const void* input,
                           void* output, std::uint64_t output_count);
  /// `edges` cuts `data` into slices of bytes, [edges[i], edges[i + 1]); rank i brings slice i, and
  /// all get all. There may be fewer slices than ranks.
  void share_slices(const CommCall& call, void* data, const std::vector<std::uint64_t>& edges);
  /// The last stage of a collective without bytes.
  void meet_again(const CommCall& call);
  /// For the stage between hosts: what this rank has waited for, and what its host is to know of
  /// it.
  WaitLedger& waits();
  void show_delay(Delay delay);

  /// Messages to the ranks of this host, for the mailbox of a group that has others too.
  MessageTransport& messages();

  bool progress(const std::vector<Transfer*>& transfers) override;
  std::uint32_t mail_ticket() const override;
  void wait_for_mail(std::uint32_t ticket, std::chrono::nanoseconds limit) override;
  void wake_mail() noexcept override;

  std::byte* memory_of(int rank, std::uint64_t offset, std::uint64_t bytes) override;
  void fail(GroupFailure failure) noexcept override;
  std::optional<GroupFailure> failure() const override;
  void throw_if_failed(const CommCall* call = nullptr) const override;
  std::string last_call_of(int rank) const override;
  std::optional<std::uint64_t> last_sequence_of(int rank) const override;
  void add_waits(std::vector<std::int64_t>& by_rank) const override;
  void beat() noexcept override;
  std::optional<std::uint64_t> beats_of(int rank) const override;

 private:
  std::unique_ptr<ShmCore> core_;
  std::unique_ptr<ShmMessages> messages_;
  std::unique_ptr<Mailbox> mailbox_;
};

}  // namespace libddp
