#pragma once

// The first bytes on a connection between hosts: who connects, and what for. Of a fixed size, so
// that a stranger can make nobody set memory aside.
//
// Both sides prove that they have read the store: the connector shows the acceptor's token from the
// acceptor's card, the acceptor answers with the connector's.
// Thread rule: values.
//
//   LinkHello hello = LinkHello::make(rank, LinkKind::Messages, 0, own_token, their_token);
//   send_bytes(socket, &hello, sizeof(hello), deadline);

#include <cstddef>
#include <cstdint>
#include <string>

namespace libddp {

/// What a connection carries. Collectives use one or more of their own, so that no message stands
/// in their way.
enum class LinkKind : std::uint32_t { Control, Messages, Collectives };

/// The bytes of memory, which is little-endian on all machines that the library runs on: a rank of
/// another kind has another magic number and is refused.
struct LinkHello {
  static constexpr std::uint32_t kMagic = 0x6c646431;
  static constexpr std::uint32_t kVersion = 1;
  static constexpr std::size_t kTokenBytes = 32;

  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  std::int32_t rank = -1;
  LinkKind kind = LinkKind::Control;
  /// Number among the connections of this kind.
  std::uint32_t index = 0;
  char own_token[kTokenBytes] = {};
  char their_token[kTokenBytes] = {};

  static LinkHello make(int rank, LinkKind kind, std::uint32_t index, const std::string& own_token,
                        const std::string& their_token);
  /// Magic number and version are this library's.
  bool is_ours() const { return magic == kMagic && version == kVersion; }
  /// Both tokens are right. Takes as long for a wrong one as for a right one.
  bool shows(const std::string& own, const std::string& theirs) const;
};
static_assert(sizeof(LinkHello) == 20 + 2 * LinkHello::kTokenBytes);

}  // namespace libddp
