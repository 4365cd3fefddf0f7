#pragma once

// What a rank says first to a lower rank of its host: who it is, and that it has read both cards.
// Thread rule: values.
//
//   send_frame(socket, MeetingHello{rank, own.token, theirs.token}.encode(), ...);
//   MeetingHello hello = MeetingHello::decode(frame.bytes);

#include <string>

namespace libddp {

struct MeetingHello {
  int rank = 0;
  std::string own_token;
  std::string their_token;

  std::string encode() const;
  /// Throws StoreError if `text` is no hello.
  static MeetingHello decode(const std::string& text);
};

}  // namespace libddp
