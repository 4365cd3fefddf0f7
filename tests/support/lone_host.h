#pragma once

// A host with one rank, rank 0 of two, for what talks to another host without one being there.
// Thread rule: one thread.
//
//   const std::unique_ptr<HostMesh> local = lone_host();

#include <memory>
#include <utility>

#include "libddp/collectives/host_mesh.h"

namespace libddp::test {

inline std::unique_ptr<HostMesh> lone_host() {
  HostMeshOptions options;
  options.group_size = 2;
  options.group_name = "fuzz";
  MeshMember& self = options.members.emplace_back();
  self.group_rank = 0;
  self.cpu_mask = HostMesh::own_cpu_mask();
  self.page = HostMesh::create_page("fuzz", 1);
  return std::make_unique<HostMesh>(std::move(options));
}

}  // namespace libddp::test
