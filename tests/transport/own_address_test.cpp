#include "libddp/transport/own_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <string>

#include "libddp/transport/tcp_socket.h"
#include "tests/support/catch.h"

using namespace libddp;

namespace {

const Deadline kPatience = Deadline::after(std::chrono::minutes(1));

// The address that a socket has, and its port.
TcpEndpoint bound_to(const UniqueFd& socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  REQUIRE(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&name), &length) == 0);
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&name);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&name);
  char text[INET6_ADDRSTRLEN] = {};
  const bool is_v4 = name.ss_family == AF_INET;
  const void* bytes = is_v4 ? static_cast<const void*>(&v4->sin_addr) : &v6->sin6_addr;
  ::inet_ntop(name.ss_family, bytes, text, sizeof(text));
  return {text, ntohs(v4->sin_port)};
}

}  // namespace

TEST_CASE("A name of this host gives a socket at its address only") {
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const OwnAddress own = bind_own_address(host, 0, kPatience);
    REQUIRE(own.socket);
    CHECK(own.reason.empty());
    CHECK(bound_to(own.socket).address == "127.0.0.1");
  }
  const OwnAddress six = bind_own_address("::1", 0, kPatience);
  // Where there is no IPv6 it is no address of this host.
  if (six.socket) CHECK(bound_to(six.socket).address == "::1");
  if (!six.socket) CHECK(six.reason == "it is no address of this host");
}

TEST_CASE("What means no single address of this host says so") {
  CHECK(bind_own_address("192.0.2.1", 0, kPatience).reason == "it is no address of this host");
  CHECK(bind_own_address("no-such-host.invalid", 0, kPatience).reason ==
        "it is no address of this host");
  CHECK(bind_own_address("0.0.0.0", 0, kPatience).reason == "it means all of them");
  CHECK(bind_own_address("::", 0, kPatience).reason == "it means all of them");
}

TEST_CASE("A port that is taken gives no socket, and no reason to listen elsewhere") {
  const TcpListener other = TcpListener::open("127.0.0.1");
  const OwnAddress own = bind_own_address("127.0.0.1", other.endpoint().port, kPatience);
  CHECK_FALSE(own.socket);
  CHECK(own.reason.empty());
}

TEST_CASE("A port whose connections have just ended can be had again") {
  OwnAddress own = bind_own_address("127.0.0.1", 0, kPatience);
  const TcpEndpoint place = bound_to(own.socket);
  REQUIRE(::listen(own.socket.get(), 1) == 0);
  const UniqueFd visitor = connect_tcp(place, Deadline::after(std::chrono::seconds(5)));
  UniqueFd met(::accept4(own.socket.get(), nullptr, nullptr, SOCK_CLOEXEC));
  REQUIRE(met);
  met.reset();  // the side that ends first waits in the kernel
  own.socket.reset();
  CHECK(bind_own_address("127.0.0.1", place.port, kPatience).socket);
}
