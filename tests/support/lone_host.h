#pragma once

// A host with one rank, rank 0 of two, for what talks to another host without one being there.
// Thread rule: one thread.
//
//   const std::unique_ptr<ShmComm> local = lone_host();

#include <memory>
#include <utility>

#include "libddp/collectives/shm_comm.h"

namespace libddp::test {

inline std::unique_ptr<ShmComm> lone_host() {
  ShmCommOptions options;
  options.group_size = 2;
  options.group_name = "fuzz";
  ShmMember& self = options.members.emplace_back();
  self.group_rank = 0;
  self.cpu_mask = ShmComm::own_cpu_mask();
  self.page = ShmComm::create_page("fuzz", 1);
  return std::make_unique<ShmComm>(std::move(options));
}

}  // namespace libddp::test
