#include "libddp/transport/link_card.h"

#include <fmt/format.h>

#include <sstream>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"

namespace libddp {
namespace {

constexpr std::size_t kMaxLinkCardBytes = 1024;
constexpr const char* kLinkFormat = "libddp-link-1";

}  // namespace

std::string LinkCard::encode() const {
  return fmt::format("{} {} {} {}", kLinkFormat, endpoint.address, endpoint.port, interface_name);
}

LinkCard LinkCard::decode(const std::string& text) {
  std::istringstream stream(text.substr(0, kMaxLinkCardBytes));
  std::string format;
  LinkCard card;
  stream >> format >> card.endpoint.address >> card.endpoint.port >> card.interface_name;
  card.interface_name = printable(card.interface_name);
  const bool is_whole = stream && format == kLinkFormat && card.endpoint.port != 0;
  // An address of another kind is found when it is used, and stands in the message then.
  if (is_whole && printable(card.endpoint.address) == card.endpoint.address) return card;
  throw StoreError(fmt::format(
      "libddp: the store holds no address of a rank but '{}'. Hint: all ranks must run the same "
      "libddp version and use a store of this run only.",
      printable(text.substr(0, 200))));
}

}  // namespace libddp
