#include "libddp/transport/own_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

namespace libddp {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList look_up_host(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const bool is_found =
      ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list) == 0;
  return {is_found ? list : nullptr, &::freeaddrinfo};
}

const in_addr& v4_of(const addrinfo& entry) {
  return reinterpret_cast<const sockaddr_in*>(entry.ai_addr)->sin_addr;
}

const in6_addr& v6_of(const addrinfo& entry) {
  return reinterpret_cast<const sockaddr_in6*>(entry.ai_addr)->sin6_addr;
}

bool is_loopback(const addrinfo& entry) {
  if (entry.ai_family == AF_INET) return ntohl(v4_of(entry).s_addr) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_LOOPBACK(&v6_of(entry));
}

bool is_any(const addrinfo& entry) {
  if (entry.ai_family == AF_INET) return v4_of(entry).s_addr == htonl(INADDR_ANY);
  return IN6_IS_ADDR_UNSPECIFIED(&v6_of(entry));
}

/// The socket, or an errno.
std::pair<UniqueFd, int> bind_to(const addrinfo& entry) {
  UniqueFd fd(::socket(entry.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // As torch has it: a port whose last listener has just gone can be had again.
  const int on = 1;
  if (fd) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (fd && ::bind(fd.get(), entry.ai_addr, entry.ai_addrlen) == 0) return {std::move(fd), 0};
  return {UniqueFd(), errno};
}

}  // namespace

OwnAddress bind_own_address(const std::string& host, std::uint16_t port) {
  const bool is_localhost = host == "localhost";
  AddressList list = look_up_host(is_localhost ? "127.0.0.1" : host, port, AI_NUMERICHOST);
  const bool is_name = list == nullptr;
  if (is_name) list = look_up_host(host, port, 0);
  OwnAddress own;
  int num_own = 0;
  for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    if (is_any(*entry)) return {UniqueFd(), "it means all of them"};
    auto [socket, error] = bind_to(*entry);
    if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) continue;  // none of this host's
    if (is_name && is_loopback(*entry)) {
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
