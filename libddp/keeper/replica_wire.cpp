#include "libddp/keeper/replica_wire.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/piece_layout.h"

namespace libddp {
namespace {

/// Below this no sum of sizes overflows.
constexpr std::uint64_t kMostBytes = 1ull << 60;

template <typename Message>
void check_frame(const Message& message, std::uint32_t right_sum) {
  if (message.magic != Message::kMagic) throw NetworkError("it sent something else");
  if (message.version != ReplicaRequest::kVersion) {
    throw NetworkError(fmt::format("it speaks version {} of replicas, this is version {}",
                                   message.version, ReplicaRequest::kVersion));
  }
  if (message.sum != right_sum) throw NetworkError("a message was damaged on its way");
}

}  // namespace

ReplicaRequest ReplicaRequest::make(const ReplicaPlace& place) {
  ReplicaRequest request;
  request.magic = kMagic;
  request.version = kVersion;
  request.rank = place.rank;
  request.generation = place.generation;
  request.sequence = place.sequence;
  LIBDDP_CHECK(place.run.size() < request.run.size(), "the name of the run is too long");
  place.run.copy(request.run.data(), place.run.size());
  request.sum = crc32c(&request, offsetof(ReplicaRequest, sum));
  return request;
}

void ReplicaRequest::check() const {
  check_frame(*this, crc32c(this, offsetof(ReplicaRequest, sum)));
  if (rank < 0 || std::memchr(run.data(), 0, run.size()) == nullptr) {
    throw NetworkError("it asks for no rank of a run");
  }
}

ReplicaPlace ReplicaRequest::place() const {
  return {.run = run.data(), .rank = rank, .generation = generation, .sequence = sequence};
}

std::uint32_t ReplicaHead::sum_of_rest() const { return crc32c(this, offsetof(ReplicaHead, sum)); }

void ReplicaHead::check() const {
  check_frame(*this, sum_of_rest());
  if (outcome == ReplicaOutcome::Refused) {
    if (reason_bytes > kMaxReasonBytes) throw NetworkError("its refusal is too long");
    return;
  }
  const bool is_sound = outcome == ReplicaOutcome::Comes && rank >= 0 && rank < world_size &&
                        layout_bytes <= PieceLayout::kMaxTextBytes && data_bytes <= kMostBytes &&
                        values_capacity <= kMaxValuesBytes && values_bytes <= values_capacity;
  if (!is_sound) throw NetworkError("its sizes are those of no snapshot");
}

TcpEndpoint parse_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  TcpEndpoint endpoint;
  bool is_sound = colon != std::string::npos && colon > 0;
  if (is_sound) {
    endpoint.address = text.substr(0, colon);
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, endpoint.port);
    is_sound = error == std::errc() && stop == end && endpoint.port > 0;
    const bool has_brackets = endpoint.address.front() == '[' && endpoint.address.back() == ']';
    const bool is_v6 = endpoint.address.find(':') != std::string::npos;
    is_sound = is_sound && has_brackets == is_v6;
    if (has_brackets) endpoint.address = endpoint.address.substr(1, endpoint.address.size() - 2);
  }
  if (is_sound) return endpoint;
  throw SnapshotError(fmt::format(
      "libddp snapshot: '{}' is no address of a keeper. Hint: give what Listen returned, as in "
      "10.0.0.1:4711.",
      printable(text.substr(0, 100))));
}

}  // namespace libddp
