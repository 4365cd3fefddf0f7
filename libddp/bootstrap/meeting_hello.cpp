#include "libddp/bootstrap/meeting_hello.h"

#include "libddp/bootstrap/meeting_text.h"

namespace libddp {
namespace {

constexpr MeetingTextForm kHelloForm{"libddp-hello-1", "the connection brought no hello"};

}  // namespace

std::string MeetingHello::encode() const {
  return MeetingTextWriter(kHelloForm).integer(rank).field(own_token).field(their_token).text();
}

MeetingHello MeetingHello::decode(const std::string& text) {
  MeetingTextReader fields(kHelloForm, text);
  MeetingHello hello;
  hello.rank = fields.integer(0);
  hello.own_token = fields.field();
  hello.their_token = fields.field();
  fields.end();
  return hello;
}

}  // namespace libddp
