// The door within a host: who is let in, and that nobody is waited for.

#include "libddp/transport/unix_door.h"

#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace std::chrono_literals;

namespace {

Deadline in_ten_seconds() { return Deadline::after(10s); }

/// Says a hello to `door` and gives what the door makes of it.
std::vector<UnixGuest> say_hello(UnixDoor& door, const UniqueFd& socket, const std::string& text) {
  send_frame(socket.get(), text, {}, in_ten_seconds());
  std::vector<UnixGuest> guests;
  const Deadline deadline = in_ten_seconds();
  while (guests.empty() && !deadline.expired()) guests = door.admit(20ms);
  return guests;
}

/// Whatever it says, the door closes without a word.
bool is_shut_out(const std::string& door) {
  try {
    const UniqueFd socket = connect_unix(door, in_ten_seconds());
    send_frame(socket.get(), "1 token token", {}, in_ten_seconds());
    char byte = 0;
    return wait_readable(socket.get(), 10s) && ::read(socket.get(), &byte, 1) <= 0;
  } catch (const NetworkError&) {
    return true;  // closed before the frame was out
  }
}

}  // namespace

TEST_CASE("A silent connection holds up none that speaks") {
  set_log_level(LogLevel::Off);
  UnixDoor door;
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(connect_unix(door.name(), in_ten_seconds()));
  const char half[] = "lddp";
  REQUIRE(::write(silent.back().get(), half, 4) == 4);
  const UniqueFd rank = connect_unix(door.name(), in_ten_seconds());
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<UnixGuest> guests = say_hello(door, rank, "1 token token");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  REQUIRE(guests.size() == 1);
  REQUIRE(guests[0].hello.bytes == "1 token token");
  CHECK(took.count() < 5);
  set_log_level(LogLevel::Warn);
}

TEST_CASE("What is no hello is dropped") {
  set_log_level(LogLevel::Off);
  UnixDoor door;
  const UniqueFd nonsense = connect_unix(door.name(), in_ten_seconds());
  const UniqueFd oversize = connect_unix(door.name(), in_ten_seconds());
  REQUIRE(::write(nonsense.get(), "GET / HTTP/1.0\r\n\r\n", 18) == 18);
  send_frame(oversize.get(), std::string(2000, 'x'), {}, in_ten_seconds());
  const UniqueFd rank = connect_unix(door.name(), in_ten_seconds());
  REQUIRE(say_hello(door, rank, "hello").size() == 1);
  REQUIRE(is_closed(nonsense.get()));
  REQUIRE(is_closed(oversize.get()));
  set_log_level(LogLevel::Warn);
}

TEST_CASE("Another user is not let in") {
  if (::geteuid() != 0) return;
  set_log_level(LogLevel::Off);
  UnixDoor door;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    ::_exit(is_shut_out(door.name()) ? 0 : 3);
  }
  int status = -1;
  std::size_t num_guests = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) num_guests += door.admit(20ms).size();
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 0);
  REQUIRE(num_guests == 0);
  set_log_level(LogLevel::Warn);
}
