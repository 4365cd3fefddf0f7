#include "libddp/bootstrap/link_card.h"

#include "libddp/base/printable.h"
#include "libddp/bootstrap/meeting_text.h"

namespace libddp {
namespace {

constexpr MeetingTextForm kLinkForm{"libddp-link-2", "the store holds no address of a rank"};
constexpr int kMaxPort = 65535;

}  // namespace

std::string LinkCard::encode() const {
  return MeetingTextWriter(kLinkForm)
      .field(endpoint.address)
      .integer(endpoint.port)
      .field(interface_name)
      .text();
}

LinkCard LinkCard::decode(const std::string& text) {
  MeetingTextReader fields(kLinkForm, text);
  LinkCard card;
  card.endpoint.address = fields.field();
  card.endpoint.port = static_cast<std::uint16_t>(fields.integer(1, kMaxPort));
  card.interface_name = printable(fields.field());
  fields.end();
  // An address of another kind is found when it is used, and stands in the message then.
  if (printable(card.endpoint.address) != card.endpoint.address) fields.refuse();
  return card;
}

}  // namespace libddp
