#include "libddp/bootstrap/link_address.h"

#include "libddp/base/printable.h"
#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr RecordForm kLinkForm{"libddp-link-2", "the store holds no address of a rank"};
constexpr int kMaxPort = 65535;

}  // namespace

std::string LinkAddress::encode() const {
  return RecordWriter(kLinkForm)
      .field(endpoint.address)
      .integer(endpoint.port)
      .field(interface_name)
      .text();
}

LinkAddress LinkAddress::decode(const std::string& text) {
  RecordReader fields(kLinkForm, text);
  LinkAddress address;
  address.endpoint.address = fields.field();
  address.endpoint.port = static_cast<std::uint16_t>(fields.integer(1, kMaxPort));
  address.interface_name = printable(fields.field());
  fields.end();
  // An address of another kind is found when it is used, and stands in the message then.
  if (printable(address.endpoint.address) != address.endpoint.address) fields.refuse();
  return address;
}

}  // namespace libddp
