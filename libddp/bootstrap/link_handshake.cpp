#include "libddp/bootstrap/link_handshake.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "libddp/base/random.h"

namespace libddp {

LinkNonce new_link_nonce() {
  LinkNonce nonce{};
  const std::string digits = random_hex(nonce.size() / 2);
  std::copy(digits.begin(), digits.end(), nonce.begin());
  return nonce;
}

LinkRequest LinkRequest::make(const LinkPlace& to, int own_rank) {
  LinkRequest request;
  request.magic = kMagic;
  request.version = kVersion;
  request.rank = own_rank;
  request.to_rank = to.rank;
  request.kind = to.kind;
  request.index = to.index;
  request.nonce = new_link_nonce();
  return request;
}

std::string describe_refusal(LinkRefusal refusal, std::uint32_t their_version) {
  switch (refusal) {
    case LinkRefusal::Version:
      return fmt::format(
          "it speaks version {} of the handshake, this rank version {}: all ranks must run the "
          "same libddp version",
          their_version, LinkRequest::kVersion);
    case LinkRefusal::Place:
      return "it does not expect this connection, or has it already";
    case LinkRefusal::Proof:
      return "it does not accept this rank's proof: another run, or another run key";
    case LinkRefusal::None:
      break;
  }
  return "for no reason that this version knows";
}

LinkProver::LinkProver(std::shared_ptr<const RunKey> session,
                       std::function<std::string(int)> token_of)
    : session_(std::move(session)), token_of_(std::move(token_of)) {}

LinkProof LinkProver::prove(LinkSide side, const LinkRequest& request,
                            const LinkNonce& accepting) const {
  LinkProof proof{};
  if (!session_) {
    const std::string token =
        token_of_(side == LinkSide::Connects ? request.to_rank : request.rank);
    std::memcpy(proof.data(), token.data(), std::min(token.size(), proof.size()));
    return proof;
  }
  const std::string_view all(reinterpret_cast<const char*>(&request), sizeof(request));
  const Digest tag =
      session_->tag({"libddp link", side == LinkSide::Connects ? "connects" : "accepts", all,
                     std::string_view(accepting.data(), accepting.size())});
  static_assert(sizeof(tag) == sizeof(proof));
  std::memcpy(proof.data(), tag.data(), proof.size());
  return proof;
}

bool LinkProver::is_proof(const LinkProof& shown, LinkSide side, const LinkRequest& request,
                          const LinkNonce& accepting) const {
  const LinkProof right = prove(side, request, accepting);
  unsigned difference = right.front() == 0 ? 1u : 0u;  // an empty token is none
  if (session_) return equal_bytes(shown.data(), right.data(), right.size());
  for (std::size_t i = 0; i < right.size(); ++i) {
    difference |= static_cast<unsigned char>(shown[i]) ^ static_cast<unsigned char>(right[i]);
  }
  return difference == 0;
}

}  // namespace libddp
