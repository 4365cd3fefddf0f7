#pragma once

// Which rank of which group speaks: the first words of every message.
// Thread rule: immutable value.
//
//   GroupIdentity me{"world", 3, 8};
//   throw StateError(me.where() + ": ...");   // "libddp[group world, rank 3/8]: ..."

#include <string>

namespace libddp {

struct GroupIdentity {
  std::string name = "world";
  int rank = 0;
  int world_size = 1;

  /// `libddp[group world, rank 3/8]`.
  std::string where() const;
};

/// One call of a user on a group: what an argument error names.
struct CallSite {
  const GroupIdentity& group;
  const char* operation;

  /// Throws ArgumentError "<where> <operation>: <problem>. Hint: <hint>.".
  [[noreturn]] void refuse(const std::string& problem, const std::string& hint) const;
};

}  // namespace libddp
