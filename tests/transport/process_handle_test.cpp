// Processes that are watched, with and without a pidfd.

#include "libddp/transport/process_handle.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace std::chrono_literals;

namespace {

/// A child that waits to be ended; reaped in the end.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ != 0) return;
    while (true) ::pause();
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  /// It is no zombie afterwards.
  void end() {
    if (is_reaped_) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    is_reaped_ = true;
  }

 private:
  const pid_t pid_;
  bool is_reaped_ = false;
};

}  // namespace

TEST_CASE("a process is seen to have ended", "[process]") {
  for (const bool has_pidfd : {true, false}) {
    INFO("with a pidfd: " << has_pidfd);
    Child child;
    const ProcessHandle handle =
        has_pidfd ? ProcessHandle(child.pid()) : ProcessHandle::by_id(child.pid());
    CHECK(handle);
    CHECK_FALSE(handle.has_ended());
    CHECK_FALSE(handle.has_ended(20ms));
    handle.signal(SIGSTOP);  // which does not end it
    CHECK_FALSE(handle.has_ended(20ms));
    handle.signal(SIGKILL);
    CHECK(handle.has_ended(60s));  // while it is a zombie
    child.end();
    CHECK(handle.has_ended());
    handle.signal(SIGKILL);
  }
}

TEST_CASE("a process that is gone before it is watched has ended", "[process]") {
  Child child;
  child.end();
  CHECK(ProcessHandle(child.pid()).has_ended());
  CHECK(ProcessHandle::by_id(child.pid()).has_ended());
  CHECK(ProcessHandle::by_id(child.pid()).fd() == -1);
}

TEST_CASE("no process is not seen, and has not ended", "[process]") {
  const ProcessHandle none;
  CHECK_FALSE(none);
  CHECK_FALSE(none.has_ended(1ms));
  CHECK(none.fd() == -1);
  none.signal(SIGKILL);
}

TEST_CASE("the process at the other end of a socket", "[process]") {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  const UniqueFd one(ends[0]);
  const UniqueFd other(ends[1]);
  const ProcessHandle self = ProcessHandle::of_peer(one.get());
  CHECK(self);
  CHECK_FALSE(self.has_ended());
}
