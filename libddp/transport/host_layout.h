#pragma once

// Which ranks share a host. Hosts are numbered in the order of their lowest rank, the ranks of a
// host in their own order.
//
// Words: *leader* = a rank that moves bytes between hosts in a collective. Every host has as many
// as the smallest host has ranks; leader c of a host talks to leader c of the others.
// Thread rule: immutable value.
//
//   const HostLayout layout = HostLayout::from_keys({"a", "b", "a"});
//   layout.hosts[0];        // {0, 2}
//   layout.host_of[1];      // 1

#include <string>
#include <vector>

namespace libddp {

struct HostLayout {
  /// Ranks of each host.
  std::vector<std::vector<int>> hosts;
  /// Host of each rank, and its place among the ranks of that host.
  std::vector<int> host_of;
  std::vector<int> index_of;

  /// `host_keys`: one text per rank, equal for ranks of one host.
  static HostLayout from_keys(const std::vector<std::string>& host_keys);

  int num_hosts() const { return static_cast<int>(hosts.size()); }
  const std::vector<int>& ranks_of(int host) const { return hosts[static_cast<std::size_t>(host)]; }
  int host(int rank) const { return host_of[static_cast<std::size_t>(rank)]; }
  int index(int rank) const { return index_of[static_cast<std::size_t>(rank)]; }
  bool is_local(int one, int other) const { return host(one) == host(other); }
  /// Ranks of the smallest host.
  int num_leaders() const;
  /// All hosts have equally many ranks.
  bool is_even() const;
};

}  // namespace libddp
