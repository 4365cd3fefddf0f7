#pragma once

// A mesh whose ranks are threads of this process, or processes forked after its construction: every
// rank has its own arena and maps the pages and arenas of the others through their descriptors.
//
//   MeshFixture fixture(3, MeshFixture::kFreeCores);
//   run_ranks(3, [&](int rank) { fixture.mesh(rank).barrier(fixture.call(OpKind::Barrier, 1)); });

#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/host_mesh.h"
#include "libddp/memory/arena.h"

namespace libddp::test {

/// Where the tensors of a test lie.
enum class Memory { Arena, Ordinary, Mixed };

class MeshFixture {
 public:
  /// CPU masks: every rank could have a core of its own, or all share one.
  static constexpr const char* kFreeCores = "ffffffff";
  static constexpr const char* kOneCore = "1";

  explicit MeshFixture(int world_size, const char* cpu_mask = kFreeCores);

  HostMesh& mesh(int rank) { return *meshes_[rank]; }
  int world_size() const { return static_cast<int>(meshes_.size()); }

  /// Memory of `rank`, filled with zeros; of Mixed, the even ranks' lies in the arena.
  std::shared_ptr<std::byte> allocate(int rank, std::size_t bytes, Memory memory);

  /// A call with a generous deadline.
  static MeshCall call(OpKind kind, std::uint64_t sequence, Dtype dtype = Dtype::UInt8,
                       std::uint64_t count = 0, ReduceOp op = ReduceOp::Sum);

 private:
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<HostMesh>> meshes_;
};

}  // namespace libddp::test
