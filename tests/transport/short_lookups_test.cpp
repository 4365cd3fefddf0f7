// A name server that does not answer is asked once, by the thread that wanted it so.

#include "libddp/transport/short_lookups.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <resolv.h>
#include <sys/socket.h>

#include <cstdint>
#include <thread>

#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"

using namespace libddp;

namespace {

/// Takes questions at an address of 127.0.0.1, and answers none.
class MuteNameServer {
 public:
  MuteNameServer() : socket_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address_);
    auto* const any = reinterpret_cast<sockaddr*>(&address_);
    REQUIRE(::bind(socket_.get(), any, length) == 0);
    REQUIRE(::getsockname(socket_.get(), any, &length) == 0);
  }

  const sockaddr_in& address() const { return address_; }

  int num_questions() const {
    char question[512];
    int number = 0;
    while (::recv(socket_.get(), question, sizeof(question), MSG_DONTWAIT) > 0) ++number;
    return number;
  }

 private:
  UniqueFd socket_;
  sockaddr_in address_{};
};

TEST_CASE("short lookups: one question") {
  const MuteNameServer server;
  int found = 0;
  int retry = 0;
  std::thread([&] {
    shorten_lookups();
    _res.nscount = 1;
    _res.nsaddr_list[0] = server.address();
    retry = _res.retry;
    sockaddr_in unknown{};
    unknown.sin_family = AF_INET;
    unknown.sin_addr.s_addr = htonl(0x0A010203);
    char name[256];
    found = ::getnameinfo(reinterpret_cast<const sockaddr*>(&unknown), sizeof(unknown), name,
                          sizeof(name), nullptr, 0, NI_NAMEREQD);
  }).join();
  CHECK(found != 0);
  CHECK(server.num_questions() <= 1);  // none where something else than DNS answers first
  REQUIRE(::res_init() == 0);
  CHECK(_res.retry > retry);  // this thread's are as they were
}

}  // namespace
