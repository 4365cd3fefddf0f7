#pragma once

// The sum of one segment over the hosts: each host owns a segment, reduces it from all hosts in
// host order, and sends it to all if it is asked to. Used by LinkStage only.
//
// Words: *piece* = what is reduced at once; *narrow* = float32 travels as bf16: the others' sums
// are rounded before they leave and added in fp32, the result is rounded once more, here too, so
// that all ranks have the same bits. Thread rule: as LinkStage.
//
//   LinkSum sum(pump, peers, buffers, host, job);
//   while (!pump.is_done()) {
//     const bool moved = pump.move();
//     if (!sum.compute() && !moved) pump.wait();
//   }

#include <cstddef>
#include <vector>

#include "libddp/collectives/bfloat16_flow.h"
#include "libddp/collectives/link_pump.h"
#include "libddp/collectives/link_stage.h"
#include "libddp/collectives/shm_collectives.h"

namespace libddp {

/// Combines what the hosts bring, in host order.
void reduce_hosts(const Reduction& reduction, int num_averaged,
                  const std::vector<const std::byte*>& sources, std::byte* to, std::size_t count);

class LinkSum {
 public:
  struct Job {
    /// What this host gives to the sum of each host; the own one's goes to `output`.
    std::vector<InterStage::Region> segments;
    std::byte* output = nullptr;
    Reduction reduction;
    int num_averaged = 0;
    /// Sends the sum to all, and takes theirs into `segments`.
    bool spreads = false;
    bool narrows = false;
  };

  /// Adds its flows to `pump`. `buffers`: one per peer.
  LinkSum(LinkPump& pump, const std::vector<LinkPeer>& peers, std::vector<LinkBuffers>& buffers,
          int host, const Job& job);

  /// Only so many bytes of the segments may be used by now: those of the hosts behind this one
  /// first, then from host 0 on, the own one last. Without it: all.
  void hold(std::size_t ready);
  /// Does what can be done with the bytes that have come; false if there was nothing.
  bool compute();

 private:
  void add_give(LinkPump& pump, std::size_t peer, const InterStage::Region& theirs);
  void add_results(LinkPump& pump, std::size_t peer, const InterStage::Region& theirs);
  bool reduce_piece();
  const std::byte* input_piece(std::size_t peer, std::size_t count);
  void round_result(std::byte* floats, std::size_t count);
  /// How many bytes so many bytes of payload are on the wire.
  std::size_t on_wire(std::size_t bytes) const { return job_.narrows ? bytes / 2 : bytes; }

  void hold_give(std::size_t peer, std::size_t bytes);

  const Job& job_;
  const int host_;
  const std::vector<LinkPeer>& peers_;
  std::vector<LinkBuffers>& buffers_;
  const std::size_t element_;
  const InterStage::Region own_;
  std::vector<LinkFlow*> inputs_;
  std::vector<LinkFlow*> results_;
  std::vector<LinkFlow*> gives_;
  std::vector<BFloat16Send> narrow_gives_;
  std::vector<std::size_t> narrow_give_counts_;
  std::vector<BFloat16Send> narrow_results_;
  std::vector<BFloat16Receive> wide_results_;
  std::vector<const std::byte*> sources_;
  std::size_t own_ready_ = 0;
  std::size_t reduced_ = 0;
};

}  // namespace libddp
