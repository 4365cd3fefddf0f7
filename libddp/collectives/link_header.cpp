#include "libddp/collectives/link_header.h"

#include <cstring>
#include <type_traits>

namespace libddp {
namespace {

static_assert(std::is_trivially_copyable_v<LinkHeader>);

bool is_description(const OpDescription& description) {
  return description.kind <= OpKind::Recv && description.dtype <= kLastDtype &&
         description.reduce_op <= ReduceOp::Bxor && description.num_dims >= 0;
}

}  // namespace

LinkHeader LinkHeader::of(const CommCall& call, std::size_t num_bytes) {
  LinkHeader header;
  header.num_bytes = static_cast<std::uint32_t>(num_bytes);
  header.fingerprint = call.description.fingerprint(call.sequence);
  header.sequence = call.sequence;
  header.description = call.description;
  return header;
}

std::optional<LinkHeader> LinkHeader::read(const std::byte* bytes) {
  LinkHeader header;
  std::memcpy(static_cast<void*>(&header), bytes, sizeof(header));
  const bool is_whole = header.magic == kMagic && is_description(header.description) &&
                        header.fingerprint == header.description.fingerprint(header.sequence);
  if (!is_whole) return std::nullopt;
  return header;
}

}  // namespace libddp
