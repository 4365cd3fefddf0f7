#pragma once

// The ranks of a job as a snapshot needs them: what each has to say, whether one has failed, and
// which of them share a host. One process without a group is a job of one rank.
// Thread rule: collectives of the group, in the order of its other ones.
//
//   JobRanks ranks(group);
//   ranks.together("save", [&] { write(); });              // an error of one is an error of all
//   std::vector<std::string> all = ranks.gather("mine");   // by rank

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libddp/group/process_group.h"
#include "libddp/transport/host_layout.h"

namespace libddp {

class JobRanks {
 public:
  /// `group` null: alone.
  explicit JobRanks(Group group);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Among the ranks of this host, and how many they are.
  int local_rank() const { return hosts_.index(rank_); }
  int local_size() const { return static_cast<int>(hosts_.ranks_of(hosts_.host(rank_)).size()); }
  const HostLayout& hosts() const { return hosts_; }
  /// On the host of rank 0.
  bool is_on_first_host() const { return hosts_.host(rank_) == hosts_.host(0); }

  std::vector<std::string> gather(const std::string& text) const;
  /// The numbers of each rank; as many on all.
  std::vector<std::vector<std::int64_t>> gather_numbers(
      const std::vector<std::int64_t>& numbers) const;
  /// What rank 0 says.
  std::string from_first(const std::string& text) const { return gather(text).front(); }

  /// Runs `work` on each rank. Where it throws on one, it throws on all: its own error there, else
  /// one of the same kind (ArgumentError goes before SnapshotError, that before others) that says
  /// which rank failed, in `what`, and of what.
  void together(const std::string& what, const std::function<void()>& work) const;

 private:
  Group group_;
  int rank_ = 0;
  int size_ = 1;
  HostLayout hosts_;
};

/// What gather_numbers() gave, whose first ones are the steps that the ranks save. Throws
/// ArgumentError, the same on all, where they differ.
void check_same_step(const std::vector<std::vector<std::int64_t>>& numbers);

}  // namespace libddp
