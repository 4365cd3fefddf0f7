#pragma once

// What a rank says first to a lower rank of its host: who it is, and that it has read both
// descriptions. Thread rule: values.
//
//   send_frame(socket, LocalRequest{rank, own.token, theirs.token}.encode(), ...);
//   LocalRequest request = LocalRequest::decode(frame.bytes);

#include <string>

namespace libddp {

struct LocalRequest {
  int rank = 0;
  std::string own_token;
  std::string their_token;

  std::string encode() const;
  /// Throws StoreError if `text` is no request.
  static LocalRequest decode(const std::string& text);
};

}  // namespace libddp
