#pragma once

// What one reconfigure() is to reach: who takes part, in which order, and where they meet. Every
// member makes it from the same handles and comes to the same plan.
//
// A list says the ranks; in a set, members of one host come side by side, in the order of their
// random names. They meet in the store of the member with the smallest name, which does not depend
// on the order: so lists in different orders meet too, and are told from each other there.
// Thread rule: immutable value.
//
//   const ReconfigurePlan plan({.uuid = 7, .handles = texts, .is_ordered = true}, own_handle);
//   plan.rank(); plan.world_size(); plan.lead().address;

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/host/member_handle.h"

namespace libddp {

/// As the caller gives it.
struct ReconfigureRequest {
  std::int64_t uuid = 0;
  std::vector<std::string> handles{};
  /// Rank by place; else any order that all agree on.
  bool is_ordered = true;
};

class ReconfigurePlan {
 public:
  static constexpr std::size_t kMaxMembers = 65536;

  /// Throws ArgumentError: no handles or too many, one that is none of libddp's (its place is
  /// named), one twice, or this process's own is not among them.
  ReconfigurePlan(const ReconfigureRequest& request, const std::string& own_handle);

  std::int64_t uuid() const { return uuid_; }
  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(members_.size()); }
  /// By rank.
  const std::vector<MemberHandle>& members() const { return members_; }
  const MemberHandle& own() const { return members_[static_cast<std::size_t>(rank_)]; }
  /// Whose store they meet in.
  const MemberHandle& lead() const { return members_[static_cast<std::size_t>(lead_)]; }
  /// Equal for equal members in equal order.
  const std::string& digest() const { return digest_; }
  /// "reconfigure(uuid=7)", for messages.
  std::string name() const;

 private:
  void refuse_twice() const;

  std::int64_t uuid_;
  std::vector<MemberHandle> members_;
  int rank_ = -1;
  int lead_ = 0;
  std::string digest_;
};

}  // namespace libddp
