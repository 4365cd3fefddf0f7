#include "libddp/bootstrap/local_request.h"

#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr RecordForm kRequestForm{"libddp-local-1", "the connection brought no request"};

}  // namespace

std::string LocalRequest::encode() const {
  return RecordWriter(kRequestForm).integer(rank).field(own_token).field(their_token).text();
}

LocalRequest LocalRequest::decode(const std::string& text) {
  RecordReader fields(kRequestForm, text);
  LocalRequest request;
  request.rank = fields.integer(0);
  request.own_token = fields.field();
  request.their_token = fields.field();
  fields.end();
  return request;
}

}  // namespace libddp
