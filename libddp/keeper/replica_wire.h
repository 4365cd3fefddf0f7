#pragma once

// What keepers of two hosts say to each other, once both have proved the run key
// (link_handshake.h):
//
//   puller -> holder  ReplicaRequest
//   holder -> puller  ReplicaHead, then either the reason of a refusal, or
//                     the text of the layout, the values, the checksums of the chunks, and of each
//                     chunk a ChunkHead and its bytes
//
// Structs of a fixed size that check themselves, as bytes of memory: little-endian on all machines
// that the library runs on. Sizes are bounded before anything is set aside for them.
// Thread rule: values.
//
//   ReplicaRequest request = ReplicaRequest::make({"job 7", 2, 1, 700});
//   request.check();                     // throws NetworkError unless it is one of this version

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "libddp/slots/slot.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp {

/// A save of a rank, wherever it lies.
struct ReplicaPlace {
  /// Of the job; at most 63 bytes.
  std::string run;
  int rank = 0;
  std::uint64_t generation = 0;
  std::uint64_t sequence = 0;
};

struct ReplicaRequest {
  static constexpr std::uint32_t kMagic = 0x6c647271;
  static constexpr std::uint32_t kVersion = 2;

  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  std::int32_t rank = 0;
  std::uint32_t unused = 0;
  std::uint64_t generation = 0;
  std::uint64_t sequence = 0;
  std::array<char, 64> run{};
  std::uint32_t unused_too = 0;
  /// Of everything before it.
  std::uint32_t sum = 0;

  static ReplicaRequest make(const ReplicaPlace& place);
  /// Throws NetworkError with a clause about what is wrong.
  void check() const;
  /// REQUIRES check().
  ReplicaPlace place() const;
};
static_assert(sizeof(ReplicaRequest) == 104);

enum class ReplicaOutcome : std::uint32_t { Comes, Refused };

struct ReplicaHead {
  static constexpr std::uint32_t kMagic = 0x6c647268;
  /// Of the text that says why not.
  static constexpr std::uint64_t kMaxReasonBytes = 4096;
  /// Of the values of a save: JSON.
  static constexpr std::uint64_t kMaxValuesBytes = 1ull << 30;

  std::uint32_t magic = kMagic;
  std::uint32_t version = ReplicaRequest::kVersion;
  ReplicaOutcome outcome = ReplicaOutcome::Comes;
  std::int32_t rank = 0;
  std::int32_t world_size = 1;
  std::uint32_t reason_bytes = 0;
  std::uint64_t generation = 0;
  std::int64_t step = 0;
  std::uint64_t sequence = 0;
  std::uint64_t start = 0;
  std::uint64_t layout_bytes = 0;
  std::uint64_t data_bytes = 0;
  std::uint64_t values_capacity = 0;
  std::uint64_t values_bytes = 0;
  std::uint32_t layout_sum = 0;
  std::uint32_t values_sum = 0;
  std::uint32_t table_sum = 0;
  std::uint32_t sum = 0;

  std::uint32_t sum_of_rest() const;
  void seal() { sum = sum_of_rest(); }
  /// Throws NetworkError with a clause about what is wrong, sizes that no memory has among it.
  void check() const;
  SavedStep saved() const { return {.step = step, .sequence = sequence, .start = start}; }
};
static_assert(sizeof(ReplicaHead) == 104);

enum class ChunkState : std::uint32_t {
  Comes = 0x4d4f4353,
  /// The holder has lost the save in the middle.
  Lost = 0x54534f4c,
};

struct ChunkHead {
  std::uint64_t index = 0;
  ChunkState state = ChunkState::Comes;
  std::uint32_t unused = 0;
};
static_assert(sizeof(ChunkHead) == 16);

/// "10.0.0.1:4711" or "[fd00::1]:4711", as TcpEndpoint::to_string writes it. Throws SnapshotError.
TcpEndpoint parse_endpoint(const std::string& text);

}  // namespace libddp
