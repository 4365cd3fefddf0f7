#pragma once

// Which bytes of which source fill the tensors of a rank, however many ranks stored them and in
// whatever pieces. Thread rule: free function.
//
//   const ReadPlan plan = plan_read(wanted, {&memory_of_rank_0, &memory_of_rank_1});
//   if (plan.missing.empty()) scatter(source_0, plan.segments[0]);

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/slots/piece_layout.h"
#include "libddp/slots/scatter.h"

namespace libddp {

/// Elements [begin, end) of a tensor, and the memory where they belong.
struct WantedPiece {
  std::string key;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::byte* to = nullptr;
};

struct ReadPlan {
  /// One list per layout.
  std::vector<std::vector<Segment>> segments;
  /// What no source has, as a clause: "elements 0 to 10 of 'w'"; empty if all is there.
  std::string missing;
};

/// Earlier sources are preferred. Throws ArgumentError where a tensor was stored with another dtype
/// or shape than is wanted; `of` says there whose layouts they are.
ReadPlan plan_read(const std::vector<WantedPiece>& wanted,
                   const std::vector<const PieceLayout*>& layouts, const std::string& of);

}  // namespace libddp
