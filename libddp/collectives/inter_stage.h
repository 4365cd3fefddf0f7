#pragma once

// The stage of a collective that crosses hosts, as HierarchicalComm uses it: LinkStage over TCP
// links is one; what another library moves between hosts is another.
//
// It runs between the leaders of one number (host_layout.h), one per host; every leader calls the
// same operations in the same order, between `begin` of one collective and that of the next.
// Errors: as Comm. Whatever goes wrong has poisoned the communicator of this host.
// Thread rule: one thread at a time; `last_call_of` from any thread.
//
//   stage.begin(call);
//   if (stage.is_leader()) stage.all_reduce(data, count, reduction, world_size);

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libddp/collectives/comm.h"
#include "libddp/collectives/shm_collectives.h"

namespace libddp {

/// Makes data ready piece by piece while what is ready is on its way already.
class Preparation {
 public:
  virtual ~Preparation() = default;
  /// Makes the next piece ready; false when that was the last one.
  virtual bool step() = 0;
  /// Bytes ready so far.
  virtual std::size_t ready() const = 0;
};

class InterStage {
 public:
  /// Up to this size a payload goes whole, through one leader; the same on all ranks.
  static constexpr std::size_t kSmallBytes = 16u << 10;

  struct Region {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  virtual ~InterStage() = default;

  virtual bool is_leader() const = 0;

  /// Starts the clock of `call`, which must outlive the stage's part in it. On every rank, leader
  /// or not.
  virtual void begin(const CommCall& call) = 0;
  /// Returns when the leaders of all hosts have called this.
  virtual void barrier() = 0;
  /// In place; AVG divides by `num_averaged`.
  virtual void all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                          int num_averaged) = 0;
  /// The same, of data that becomes ready in the order in which it is needed: from the end of this
  /// host's segment (`segment_of`) to the end, then from the beginning. Here: all of it first.
  virtual void all_reduce_prepared(std::byte* data, std::size_t count, const Reduction& reduction,
                                   int num_averaged, Preparation& preparation);
  /// The part of the data that `host` reduces.
  static Slice segment_of(std::size_t count, std::size_t element_bytes, int host, int num_hosts) {
    return slice_of(count, element_bytes, host, num_hosts);
  }
  /// `regions[h]`: what this host gives to the sum of host h. The sum of the own region (that of
  /// `host`) goes to `output`, which may be that region; the others stay as they are.
  /// Here: an all-reduce of each, for stages that know no better.
  virtual void reduce_scatter(const std::vector<Region>& regions, int host, std::byte* output,
                              const Reduction& reduction, int num_averaged);
  /// `regions[host]` is that host's stretch of memory here; the own one goes to all.
  virtual void all_gather(const std::vector<Region>& regions) = 0;
  virtual void broadcast(std::byte* data, std::size_t bytes, int root_host) = 0;

  /// What a leader of another host has called last, as far as it is known here.
  virtual std::optional<std::string> last_call_of(int rank) const = 0;
  /// As Comm; any one thread.
  virtual std::optional<GroupFailure> look_at_network([[maybe_unused]] std::int64_t now_ns) {
    return std::nullopt;
  }
};

}  // namespace libddp
