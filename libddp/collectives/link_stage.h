#pragma once

// The stage of a collective that crosses hosts (inter_stage.h) over TCP links.
//
// Each pair of leaders has two links of one or more connections: *give* carries headers and what
// the other side is to reduce, *result* carries results. Every exchange begins with headers in both
// directions between all of them: whoever called something else is found before a byte of payload
// is used, and small payloads travel with the header.
//
// All-reduce: the hosts own segments; each reduces its segment from all hosts, in host order, and
// sends it to all, chunk by chunk, so that results of one chunk travel while the next is coming. A
// reduce-scatter does the first half.
// The bits are the same on every rank and from run to run. Each host's own sum is rounded to the
// dtype once, the sum of the hosts' sums (fp32 for bf16 and fp16) a second time.
//
// Headers also say whom their sender waited for on its own host, so that the time until the last
// one has come is charged to the rank that is late, wherever it is. Thread rule: one thread at a
// time; `last_call_of` from any thread.
//
//   LinkStage stage(local, {.index = 0, .host = 1, .num_hosts = 2}, std::move(peers));
//   stage.begin(call);
//   stage.all_reduce(data, count, reduction, world_size);

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/collectives/inter_stage.h"
#include "libddp/collectives/link_failure.h"
#include "libddp/collectives/link_header.h"
#include "libddp/collectives/link_pump.h"
#include "libddp/collectives/shm_collectives.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/transport/link_health.h"

namespace libddp {

/// The leader of another host.
struct LinkPeer {
  int host = 0;
  int rank = 0;
  pid_t pid = 0;
  std::string host_name;
  /// One or more sockets each, as many on all ranks.
  std::vector<UniqueFd> give;
  std::vector<UniqueFd> result;
};

/// Memory for what is on its way from and to one peer, kept from call to call.
struct LinkBuffers {
  std::vector<std::byte> inputs;
  // Where float32 travels as bf16:
  std::vector<std::byte> gives;
  std::vector<std::byte> results_out;
  std::vector<std::byte> results_in;
  std::vector<std::byte> wide;
};

class LinkStage : public InterStage, private LinkWatch {
 public:
  /// `peers`: one per other host, ordered by host; empty on a rank that is no leader.
  /// `narrows_floats`: sums of float32 travel as bf16 (LinkSettings::wire_dtype).
  LinkStage(ShmComm& local, int host, std::vector<LinkPeer> peers, bool narrows_floats = false);

  bool is_leader() const override { return !peers_.empty(); }
  int num_hosts() const { return static_cast<int>(peers_.size()) + 1; }

  void begin(const CommCall& call) override;
  /// Headers only.
  void barrier() override;
  void all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                  int num_averaged) override;
  void all_reduce_prepared(std::byte* data, std::size_t count, const Reduction& reduction,
                           int num_averaged, Preparation& preparation) override;
  void reduce_scatter(const std::vector<Region>& regions, int host, std::byte* output,
                      const Reduction& reduction, int num_averaged) override;
  void all_gather(const std::vector<Region>& regions) override;
  void broadcast(std::byte* data, std::size_t bytes, int root_host) override;

  std::optional<std::string> last_call_of(int rank) const override;
  std::optional<GroupFailure> look_at_network(std::int64_t now_ns) override {
    return network_failure(health_.look(now_ns));
  }

 private:
  struct Incoming {
    std::vector<std::byte> bytes;
    bool is_checked = false;
    /// Whom the peer says that it has waited for.
    Delay late;
  };

  void exchange(const Region& out, const std::vector<std::size_t>& in_bytes);
  void check_headers(const std::vector<const LinkFlow*>& receives, bool has_waited);
  void check_header(std::size_t peer);
  void count_wait();
  [[noreturn]] void report_garbage(std::size_t peer, const std::string& what);
  [[noreturn]] void report_mismatch(std::size_t peer, const LinkHeader& theirs);
  void reduce_small(std::byte* data, std::size_t count, const Reduction& reduction, int divisor);
  std::vector<Region> segments_of(std::byte* data, std::size_t count, std::size_t element) const;
  void reduce_large(std::vector<Region> segments, std::byte* output, bool spreads,
                    const Reduction& reduction, int divisor, Preparation* preparation = nullptr);
  std::byte* payload_of(std::size_t peer);
  std::string name_of(const LinkPeer& peer) const;
  /// Index of the peer on `host`.
  std::size_t peer_on(int host) const;

  void check(const std::deque<LinkFlow>& flows) override;
  void report_lost(const LinkFlow& flow, int socket, int error) override;

  ShmComm& local_;
  const int host_;
  std::vector<LinkPeer> peers_;
  /// Of the thread that looks at the network.
  LinkHealth health_;
  std::vector<Incoming> incoming_;
  std::vector<std::byte> outgoing_;
  std::vector<LinkBuffers> buffers_;
  const bool narrows_floats_;

  /// Of the exchange of headers that runs: which peer's came last, how long after it began; -1 if
  /// nobody had to be waited for.
  int last_peer_ = -1;
  std::int64_t waited_ns_ = 0;
  std::int64_t exchange_begin_ns_ = 0;

  const CommCall* call_ = nullptr;
  Deadline::Clock::time_point start_{};
  Deadline deadline_ = Deadline::never();

  mutable std::mutex last_calls_mutex_;
  std::map<int, std::string> last_calls_;
};

}  // namespace libddp
