// What a process says to a keeper, and the keeper to a process: understood messages say the same
// when they are read again.

#include <string>

#include "libddp/base/error.h"
#include "libddp/keeper/keeper_message.h"
#include "libddp/slots/snapshot_index.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

template <typename Kind>
void check(const std::string& text) {
  try {
    const std::string once = Kind::decode(text).encode();
    fuzz::require(Kind::decode(once).encode() == once);
  } catch (const SnapshotError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  check<KeeperRequest>(text);
  check<KeeperReply>(text);
  check<StoredRank>(text);
  check<SnapshotIndex>(text);
  return 0;
}
