#pragma once

// What stands before every collective on a connection between hosts: which call it is. The other
// end has proved that it belongs to the run; that it speaks sense is found here, before anything
// else of what it sent is looked at.
//
// Both ends run one build on machines of one kind, so the bytes are those of memory.
// Thread rule: values.
//
//   LinkHeader mine = LinkHeader::of(call, payload_bytes);
//   std::optional<LinkHeader> theirs = LinkHeader::read(bytes);   // sizeof(LinkHeader) of them
//   if (!theirs) refuse();
//   if (theirs->fingerprint != mine.fingerprint) report_both(mine, *theirs);

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "libddp/collectives/comm.h"

namespace libddp {

struct LinkHeader {
  static constexpr std::uint32_t kMagic = 0x6c646833;

  std::uint32_t magic = kMagic;
  /// Payload that follows.
  std::uint32_t num_bytes = 0;
  std::uint64_t fingerprint = 0;
  std::uint64_t sequence = 0;
  /// Whom the sender has waited for on its host since the leaders met last; may be any number.
  std::int64_t late_rank = -1;
  std::int64_t late_ns = 0;
  OpDescription description{};

  static LinkHeader of(const CommCall& call, std::size_t num_bytes);
  /// nullopt for anything that `of` does not make: another magic number, a kind, dtype or operation
  /// that there is not, a fingerprint of something else.
  static std::optional<LinkHeader> read(const std::byte* bytes);

  std::string call_text() const { return description.to_string(sequence); }
};

}  // namespace libddp
