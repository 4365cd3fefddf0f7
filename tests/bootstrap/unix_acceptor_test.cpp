// The acceptor within a host: who is let in, and that nobody is waited for.

#include "libddp/bootstrap/unix_acceptor.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/transport/frame.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/soon.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::soon;

namespace {

/// Sends a request to `acceptor` and gives what the acceptor makes of it.
std::vector<AdmittedPeer> send_request(UnixAcceptor& acceptor, const UniqueFd& socket,
                                       const std::string& text) {
  send_frame(socket.get(), text, {}, soon());
  std::vector<AdmittedPeer> all_admitted;
  const Deadline deadline = soon();
  while (all_admitted.empty() && !deadline.expired()) all_admitted = acceptor.admit(20ms);
  return all_admitted;
}

/// Whatever it says, the acceptor closes without a word.
bool is_shut_out(const std::string& acceptor) {
  try {
    const UniqueFd socket = connect_unix(acceptor, soon());
    send_frame(socket.get(), "1 token token", {}, soon());
    char byte = 0;
    return wait_readable(socket.get(), 60s) && ::read(socket.get(), &byte, 1) <= 0;
  } catch (const NetworkError&) {
    return true;  // closed before the frame was out
  }
}

}  // namespace

TEST_CASE("A silent connection holds up none that speaks") {
  set_log_level(LogLevel::Off);
  UnixAcceptor acceptor;
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(connect_unix(acceptor.name(), soon()));
  const char half[] = "lddp";
  REQUIRE(::write(silent.back().get(), half, 4) == 4);
  const UniqueFd rank = connect_unix(acceptor.name(), soon());
  const std::vector<AdmittedPeer> all_admitted = send_request(acceptor, rank, "1 token token");
  REQUIRE(all_admitted.size() == 1);
  REQUIRE(all_admitted[0].request.bytes == "1 token token");
  // Nobody had to lose patience with them.
  REQUIRE_FALSE(is_closed(silent.back().get()));
  set_log_level(LogLevel::Warn);
}

TEST_CASE("What is no request is dropped") {
  set_log_level(LogLevel::Off);
  UnixAcceptor acceptor;
  const UniqueFd nonsense = connect_unix(acceptor.name(), soon());
  const UniqueFd oversize = connect_unix(acceptor.name(), soon());
  REQUIRE(::write(nonsense.get(), "GET / HTTP/1.0\r\n\r\n", 18) == 18);
  send_frame(oversize.get(), std::string(2000, 'x'), {}, soon());
  const UniqueFd rank = connect_unix(acceptor.name(), soon());
  REQUIRE(send_request(acceptor, rank, "request").size() == 1);
  REQUIRE(is_closed(nonsense.get()));
  REQUIRE(is_closed(oversize.get()));
  set_log_level(LogLevel::Warn);
}

TEST_CASE("Of a crowd that says nothing the oldest give way") {
  set_log_level(LogLevel::Off);
  UnixAcceptor acceptor;
  std::vector<UniqueFd> crowd;
  for (std::size_t i = 0; i < PendingConnections<PendingConnection>::kMost + 2; ++i) {
    crowd.push_back(connect_unix(acceptor.name(), soon()));
    if (i % 64 == 0) acceptor.admit(0ms);
  }
  const Deadline deadline = soon();
  while (!is_closed(crowd[1].get()) && !deadline.expired()) acceptor.admit(0ms);
  REQUIRE(is_closed(crowd[0].get()));
  REQUIRE(is_closed(crowd[1].get()));
  REQUIRE_FALSE(is_closed(crowd[2].get()));
  REQUIRE_FALSE(is_closed(crowd.back().get()));
  REQUIRE(send_request(acceptor, crowd[2], "request").size() == 1);
  set_log_level(LogLevel::Warn);
}

TEST_CASE("An acceptor within a host without descriptors goes on") {
  set_log_level(LogLevel::Off);
  UnixAcceptor acceptor;
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 8; ++i) strangers.push_back(connect_unix(acceptor.name(), soon()));
  const UniqueFd rank = connect_unix(acceptor.name(), soon());
  send_frame(rank.get(), "request", {}, soon());
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int lowest_free = ::dup(0);
  ::close(lowest_free);
  const rlimit tight{static_cast<rlim_t>(lowest_free), before.rlim_max};
  const rlimit for_three{static_cast<rlim_t>(lowest_free + 3), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &tight) == 0);
  std::size_t num_taken = 0;
  for (int i = 0; i < 5; ++i) num_taken += acceptor.admit(20ms).size();
  const bool nobody_left = !is_closed(strangers[0].get());
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &for_three) == 0);
  std::vector<AdmittedPeer> all_admitted;
  const Deadline deadline = soon();
  while (all_admitted.empty() && !deadline.expired()) all_admitted = acceptor.admit(20ms);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(num_taken == 0);
  REQUIRE(nobody_left);
  REQUIRE(all_admitted.size() == 1);
  set_log_level(LogLevel::Warn);
}

TEST_CASE("Another user is not let in") {
  if (::geteuid() != 0) return;
  set_log_level(LogLevel::Off);
  UnixAcceptor acceptor;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    ::_exit(is_shut_out(acceptor.name()) ? 0 : 3);
  }
  int status = -1;
  std::size_t num_admitted = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) num_admitted += acceptor.admit(20ms).size();
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) == 0);
  REQUIRE(num_admitted == 0);
  set_log_level(LogLevel::Warn);
}
