// Everything that is read as text from the store: cards, addresses, hails, failures, hellos,
// seals. What is
// understood can be written and read again, and is then the same.

#include <string>

#include "libddp/base/error.h"
#include "libddp/bootstrap/link_card.h"
#include "libddp/bootstrap/meeting_card.h"
#include "libddp/bootstrap/meeting_failure.h"
#include "libddp/bootstrap/meeting_hello.h"
#include "libddp/bootstrap/meeting_session.h"
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

// Two cards are compared, with each other and with this rank's.
void compare(const std::string& text) {
  try {
    const MeetingCard theirs = MeetingCard::decode(text);
    MeetingCard own = theirs;
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
  check<MeetingCard>(text);
  compare(text);
  check<LinkCard>(text);
  check<Hail>(text);
  check<MeetingFailure>(text);
  check<MeetingHello>(text);
  static InMemoryStore store;
  static const SealedStore sealed(store, RunKey::from_bytes(std::string(32, 'k')), "fuzz");
  fuzz::require(!sealed.open("card/0", text));
  fuzz::require(sealed.open("card/0", sealed.seal("card/0", text)) == text);
  return 0;
}
