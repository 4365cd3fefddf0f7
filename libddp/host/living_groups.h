#pragma once

// Which groups of this process live over which store, so that a group that is being made ends as
// soon as one of them loses a rank that both need, or its network: the watchdog of a group that
// exists notices in seconds what the new one would wait for until its timeout. What else a group
// fails of (an abort, a timeout, a peer that dropped it) is its own affair.
// Thread rule: any thread.
//
//   state->living.join(store, global_ranks, [backend] { return backend->loss(); });
//   const LossWatch watch(store, global_ranks);                // the others, from now on
//   watch.throw_if_lost("libddp[group sub, rank 0/2] create");

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace libddp {

/// A group's place among the living ones; a member of it.
class LivingGroup {
 public:
  /// See Backend::loss.
  using Loss = std::function<std::exception_ptr()>;

  LivingGroup() = default;
  ~LivingGroup() { leave(); }
  LivingGroup(const LivingGroup&) = delete;
  LivingGroup& operator=(const LivingGroup&) = delete;

  /// `store`: identity only, never followed.
  void join(const void* store, std::vector<int> global_ranks, Loss loss);
  void leave();

 private:
  std::uint64_t number_ = 0;
};

/// The groups over one store that have lost nobody when it is made.
class LossWatch {
 public:
  /// `global_ranks`: of the group that is being made.
  LossWatch(const void* store, std::vector<int> global_ranks);

  /// Throws an error of the loss's class, which begins with `where`, if one has lost one of these
  /// ranks, or the network, since.
  void throw_if_lost(const std::string& where) const;

 private:
  bool needs(const std::vector<int>& group, int rank) const;

  const std::vector<int> global_ranks_;
  std::vector<std::uint64_t> numbers_;
};

}  // namespace libddp
