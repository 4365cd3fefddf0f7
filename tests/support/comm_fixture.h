#pragma once

// A communicator whose ranks are threads of this process, or processes forked after its
// construction: every rank has its own arena and maps the pages and arenas of the others through
// their descriptors.
//
//   CommFixture fixture(3, CommFixture::kFreeCores);
//   run_ranks(3, [&](int rank) { fixture.comm(rank).barrier(fixture.call(OpKind::Barrier, 1)); });

#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/shm_comm.h"
#include "libddp/memory/arena.h"

namespace libddp::test {

/// Where the tensors of a test lie.
enum class Memory { Arena, Ordinary, Mixed };

class CommFixture {
 public:
  /// CPU masks: every rank could have a core of its own, or all share one.
  static constexpr const char* kFreeCores = "ffffffff";
  static constexpr const char* kOneCore = "1";

  explicit CommFixture(int world_size, const char* cpu_mask = kFreeCores);

  ShmComm& comm(int rank) { return *comms_[rank]; }
  int world_size() const { return static_cast<int>(comms_.size()); }

  /// Memory of `rank`, filled with zeros; of Mixed, the even ranks' lies in the arena.
  std::shared_ptr<std::byte> allocate(int rank, std::size_t bytes, Memory memory);

  /// A call with a generous deadline.
  static CommCall call(OpKind kind, std::uint64_t sequence, Dtype dtype = Dtype::UInt8,
                       std::uint64_t count = 0, ReduceOp op = ReduceOp::Sum);

 private:
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<std::unique_ptr<ShmComm>> comms_;
};

}  // namespace libddp::test
