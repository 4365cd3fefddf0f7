#include "libddp/transport/own_address.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "libddp/transport/host_lookup.h"

namespace libddp {
namespace {

const in_addr& v4_of(const HostAddress& address) {
  return reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr;
}

const in6_addr& v6_of(const HostAddress& address) {
  return reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr;
}

bool is_loopback(const HostAddress& address) {
  if (address.family() == AF_INET) return ntohl(v4_of(address).s_addr) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_LOOPBACK(&v6_of(address));
}

bool is_any(const HostAddress& address) {
  if (address.family() == AF_INET) return v4_of(address).s_addr == htonl(INADDR_ANY);
  return IN6_IS_ADDR_UNSPECIFIED(&v6_of(address));
}

/// The socket, or an errno.
std::pair<UniqueFd, int> bind_to(const HostAddress& address) {
  UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // As torch has it: a port whose last listener has just gone can be had again.
  const int on = 1;
  if (fd) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd && ::bind(fd.get(), address.get(), address.length) == 0) return {std::move(fd), 0};
  return {UniqueFd(), errno};
}

}  // namespace

OwnAddress bind_own_address(const std::string& host, std::uint16_t port, Deadline deadline) {
  const HostLookup found = look_up_host(host == "localhost" ? "127.0.0.1" : host, port, deadline);
  OwnAddress own;
  int num_own = 0;
  for (const HostAddress& address : found.addresses) {
    if (is_any(address)) return {UniqueFd(), "it means all of them"};
    auto [socket, error] = bind_to(address);
    if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) continue;  // none of this host's
    if (found.is_name && is_loopback(address)) {
      return {UniqueFd(), "it is loopback here, and may be another address elsewhere"};
    }
    // With an error, whoever listens finds it again and tells.
    own.socket = std::move(socket);
    ++num_own;
  }
  if (num_own == 1) return own;
  return {UniqueFd(),
          num_own == 0 ? "it is no address of this host" : "it means several addresses"};
}

}  // namespace libddp
