// Everything that is read as text from the store: descriptions, addresses, join entries, failures,
// requests, seals. What is understood can be written and read again, and is then the same.

#include <string>

#include "libddp/base/error.h"
#include "libddp/bootstrap/bootstrap_failure.h"
#include "libddp/bootstrap/bootstrap_session.h"
#include "libddp/bootstrap/link_address.h"
#include "libddp/bootstrap/local_request.h"
#include "libddp/bootstrap/peer_info.h"
#include "libddp/bootstrap/sealed_store.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

template <typename Kind>
void check(const std::string& text) {
  try {
    const std::string once = Kind::decode(text).encode();
    fuzz::require(Kind::decode(once).encode() == once);
  } catch (const StoreError&) {
  }
}

void check_failure(const std::string& text) {
  try {
    const std::string once = encode_failure(decode_failure(text));
    fuzz::require(encode_failure(decode_failure(once)) == once);
  } catch (const StoreError&) {
  }
}

// Two descriptions are compared, with each other and with this rank's.
void compare(const std::string& text) {
  try {
    const PeerInfo theirs = PeerInfo::decode(text);
    PeerInfo own = theirs;
    fuzz::require(!find_disagreement(own, theirs));
    own.agreement += "!";
    fuzz::require(find_disagreement(own, theirs).has_value());
    own.world_size = 3;
    find_disagreement(theirs, own);
  } catch (const StoreError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text = fuzz::Bytes(data, size).rest();
  check<PeerInfo>(text);
  compare(text);
  check<LinkAddress>(text);
  check<JoinEntry>(text);
  check_failure(text);
  check<LocalRequest>(text);
  static InMemoryStore store;
  static const SealedStore sealed(store, RunKey::from_bytes(std::string(32, 'k')), "fuzz");
  fuzz::require(!sealed.open("peer/0", text));
  fuzz::require(sealed.open("peer/0", sealed.seal("peer/0", text)) == text);
  return 0;
}
