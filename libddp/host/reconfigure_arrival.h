#pragma once

// What a member says in the lead's store while it is in a reconfigure, so that members which were
// given different uuids or handles learn that, instead of waiting for each other.
// Thread rule: value.
//
//   store.set(key, ReconfigureArrival::of(plan).encode());
//   if (!ReconfigureArrival::decode(text).is_same_round(mine)) ...

#include <cstdint>
#include <string>

#include "libddp/host/reconfigure_plan.h"

namespace libddp {

struct ReconfigureArrival {
  std::int64_t uuid = 0;
  int world_size = 0;
  std::string digest;

  static ReconfigureArrival of(const ReconfigurePlan& plan);

  std::string encode() const;
  /// Throws StoreError if `text` is none.
  static ReconfigureArrival decode(const std::string& text);

  /// Keys of this round begin with it.
  std::string round() const;
  bool is_same_round(const ReconfigureArrival& other) const { return round() == other.round(); }
  /// How the two differ, for messages: "uuid 7 with 3 handles, ... uuid 8 with 3 handles".
  std::string difference(const ReconfigureArrival& other) const;
};

}  // namespace libddp
