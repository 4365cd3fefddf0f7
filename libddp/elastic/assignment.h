#pragma once

// What the launcher tells a worker as an epoch begins: who it is in the group that meets now.
// Thread rule: a value.

#include <map>
#include <string>

namespace libddp {

struct Assignment {
  /// All hosts' number of this meeting, from 0.
  int epoch = 0;
  /// Of `--max-restarts`, used so far.
  int restarts = 0;
  /// This process was in an epoch before.
  bool is_survivor = false;
  /// Why the epoch before ended, in a line; empty where nothing failed.
  std::string failure = {};
  /// RANK, WORLD_SIZE, MASTER_ADDR and the others of torchrun's.
  std::map<std::string, std::string> environment = {};
};

}  // namespace libddp
