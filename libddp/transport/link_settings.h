#pragma once

// How the collectives of a group use the network between hosts: the user's choices, on which all
// ranks must agree. Thread rule: value.
//
//   options.agreement += settings.to_text();   // a rank with others is an error that shows both

#include <string>

namespace libddp {

struct LinkSettings {
  static constexpr int kMaxSockets = 8;

  /// Connections per pair of carriers and kind of bytes; stripes of the payload go over them in
  /// turn.
  int sockets_per_link = 1;

  /// LIBDDP_SOCKETS_PER_LINK; throws ArgumentError if that cannot be read.
  static LinkSettings from_environment();
  /// Equal exactly for equal settings.
  std::string to_text() const;
};

}  // namespace libddp
