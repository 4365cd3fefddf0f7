#include "libddp/base/op_description.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "libddp/base/printable.h"

namespace libddp {
namespace {

bool reduces(OpKind kind) {
  return kind == OpKind::AllReduce || kind == OpKind::ReduceScatter || kind == OpKind::Reduce;
}

// One round of a multiplicative hash: every input bit reaches the upper half, the shift brings it
// back down.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

std::string shape_text(const OpDescription& description) {
  if (description.num_dims == 0 && description.count != 1) {
    return fmt::format("[{}]", description.count);
  }
  std::string text = "[";
  const int kept = std::min<int>(description.num_dims, OpDescription::kMaxDims);
  for (int i = 0; i < kept; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(description.shape[i]);
  }
  if (description.num_dims > kept) text += ", ...";
  return text + "]";
}

}  // namespace

std::string_view name(OpKind kind) {
  switch (kind) {
    case OpKind::AllReduce:
      return "all_reduce";
    case OpKind::ReduceScatter:
      return "reduce_scatter";
    case OpKind::AllGather:
      return "all_gather";
    case OpKind::Broadcast:
      return "broadcast";
    case OpKind::Barrier:
      return "barrier";
    case OpKind::Reduce:
      return "reduce";
    case OpKind::Gather:
      return "gather";
    case OpKind::Scatter:
      return "scatter";
    case OpKind::AllToAll:
      return "all_to_all";
    case OpKind::Send:
      return "send";
    case OpKind::Recv:
      return "recv";
  }
  return "unknown";
}

std::uint64_t OpDescription::fingerprint(std::uint64_t sequence) const {
  const std::uint64_t packed = static_cast<std::uint64_t>(kind) |
                               static_cast<std::uint64_t>(dtype) << 8 |
                               static_cast<std::uint64_t>(reduce_op) << 16 |
                               static_cast<std::uint64_t>(num_dims & 0xFF) << 24 |
                               static_cast<std::uint64_t>(static_cast<std::uint32_t>(root)) << 32;
  std::uint64_t hash = mix(mix(mix(0x243F6A8885A308D3ull, sequence), packed), count);
  const int kept = std::min<int>(num_dims, kMaxDims);
  for (int i = 0; i < kept; ++i) hash = mix(hash, static_cast<std::uint64_t>(shape[i]));
  if (label[0] == '\0') return hash;
  for (std::size_t i = 0; i < sizeof(label); i += sizeof(std::uint64_t)) {
    std::uint64_t characters;
    std::memcpy(&characters, label + i, sizeof(characters));
    hash = mix(hash, characters);
  }
  return hash;
}

std::string OpDescription::to_string(std::uint64_t sequence) const {
  std::string text = fmt::format("{} #{}", name(kind), sequence);
  if (kind != OpKind::Barrier) {
    text += fmt::format(" {} {}", libddp::name(dtype), shape_text(*this));
    if (reduces(kind)) text += fmt::format(" {}", libddp::name(reduce_op));
  }
  if (root >= 0) text += fmt::format(" root {}", root);
  const std::string_view served(label, strnlen(label, sizeof(label)));
  // It may be a peer's.
  if (!served.empty()) text += fmt::format(" ({})", printable(served));
  return text;
}

}  // namespace libddp
