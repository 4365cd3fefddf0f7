#pragma once

// Where a rank listens for the ranks of other hosts, as short text in the store.
// Thread rule: values.
//
//   store.set("link/3", address.encode());
//   LinkAddress address = LinkAddress::decode(*store.try_get("link/3"));

#include <string>

#include "libddp/transport/tcp_socket.h"

namespace libddp {

struct LinkAddress {
  TcpEndpoint endpoint;
  /// Name of the network interface, for messages.
  std::string interface_name;

  std::string encode() const;
  /// Throws StoreError if `text` is no link address.
  static LinkAddress decode(const std::string& text);
};

}  // namespace libddp
