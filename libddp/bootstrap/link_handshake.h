#pragma once

// The first bytes on a connection between hosts: who connects, what for, and a proof of both sides
// that they belong to this bootstrap. Nothing else is read before, and every message has one size,
// so that a stranger can make nobody set memory aside.
//
// NOTE [Handshake] c = who connects, a = who accepts
//   c -> a  LinkRequest   who, to whom, what for, nonce of c
//   a -> c  LinkReply   nonce of a, or why not
//   c -> a  LinkProof   proves c
//   a -> c  LinkReply   proves a, or why not
// With a run key a proof is an HMAC of the session key (bootstrap_session.h) over all of the
// request, both nonces and who proves. Without one it is the other's token, as its description in
// the store has it: a proof that one has read the store. Magic number and version stand first in
// every version, so that other versions can be told apart. Thread rule: values; LinkProver is
// immutable.
//
//   LinkRequest request = LinkRequest::make({0, LinkKind::Messages, 0}, own_rank);
//   send_bytes(socket, &request, sizeof(request), deadline);

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "libddp/bootstrap/run_key.h"

namespace libddp {

/// What a connection carries. Collectives use one or more of their own, so that no message stands
/// in their way.
enum class LinkKind : std::uint32_t { Control, Messages, Collectives };

/// One connection of a rank: to whom, what for, and its number among those of this kind.
struct LinkPlace {
  std::int32_t rank = -1;
  LinkKind kind = LinkKind::Control;
  std::uint32_t index = 0;
};

using LinkNonce = std::array<char, 32>;
LinkNonce new_link_nonce();

/// The bytes of memory, which is little-endian on all machines that the library runs on: a rank of
/// another kind has another magic number and is refused.
struct LinkRequest {
  static constexpr std::uint32_t kMagic = 0x6c646431;
  static constexpr std::uint32_t kVersion = 2;
  /// Magic number and version.
  static constexpr std::size_t kPrefixBytes = 8;

  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  std::int32_t rank = -1;
  std::int32_t to_rank = -1;
  LinkKind kind = LinkKind::Control;
  std::uint32_t index = 0;
  LinkNonce nonce{};

  static LinkRequest make(const LinkPlace& to, int own_rank);
  bool is_libddp() const { return magic == kMagic; }
  bool is_this_version() const { return version == kVersion; }
};
static_assert(sizeof(LinkRequest) == 56);

enum class LinkRefusal : std::uint32_t { None, Version, Place, Proof };

/// "it speaks version 3 of the handshake, this rank version 2".
std::string describe_refusal(LinkRefusal refusal, std::uint32_t their_version);

using LinkProof = std::array<char, 32>;

struct LinkReply {
  std::uint32_t magic = LinkRequest::kMagic;
  std::uint32_t version = LinkRequest::kVersion;
  LinkRefusal refusal = LinkRefusal::None;
  /// A nonce in the first reply, a proof in the second.
  std::array<char, 32> bytes{};
};
static_assert(sizeof(LinkReply) == 44);

enum class LinkSide { Connects, Accepts };

/// Makes and checks the proofs of one rank.
class LinkProver {
 public:
  /// With a key. `session`: null = without; then `token_of(rank)` gives the token of its
  /// description.
  LinkProver(std::shared_ptr<const RunKey> session, std::function<std::string(int)> token_of);

  LinkProof prove(LinkSide side, const LinkRequest& request, const LinkNonce& accepting) const;
  /// Takes as long for a wrong proof as for a right one.
  bool is_proof(const LinkProof& shown, LinkSide side, const LinkRequest& request,
                const LinkNonce& accepting) const;

 private:
  std::shared_ptr<const RunKey> session_;
  std::function<std::string(int)> token_of_;
};

}  // namespace libddp
