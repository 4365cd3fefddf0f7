#pragma once

// How the collectives of a group use the network between hosts: the user's choices, on which all
// ranks must agree. What the user did not choose for a group is what the environment says.
// Thread rule: value.
//
//   const LinkSettings settings = LinkSettings::chosen(4, std::nullopt);
//   options.agreement += settings.to_text();   // a rank with others is an error that shows both

#include <optional>
#include <string>

#include "libddp/base/dtype.h"

namespace libddp {

struct LinkSettings {
  static constexpr int kMaxSockets = 8;

  /// Connections per pair of leaders and kind of bytes; stripes of the payload go over them in
  /// turn.
  int sockets_per_link = 1;
  /// What large float32 sums are between hosts: Float32 or BFloat16.
  Dtype wire_dtype = Dtype::Float32;

  /// LIBDDP_SOCKETS_PER_LINK and LIBDDP_WIRE_DTYPE; throws ArgumentError if one cannot be read.
  static LinkSettings from_environment();
  /// With a choice of the user in place of a variable. Throws ArgumentError for one that cannot be.
  static LinkSettings chosen(std::optional<int> sockets_per_link, std::optional<Dtype> wire_dtype);
  /// Equal exactly for equal settings.
  std::string to_text() const;
};

}  // namespace libddp
