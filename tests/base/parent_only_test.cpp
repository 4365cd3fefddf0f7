#include "libddp/base/parent_only.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"

using namespace libddp;

namespace {

/// Exit status of a child that answers with `f`.
template <class F>
int status_of_child(F f) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(f());
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

bool is_socket(int fd) {
  int type = 0;
  socklen_t size = sizeof(type);
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0;
}

}  // namespace

TEST_CASE("A forked child has no copy of a marked descriptor") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  UniqueFd marked(ends[0]);
  UniqueFd other(ends[1]);
  close_in_children(marked.get());
  close_in_children(-1);
  close_in_children(1 << 30);

  const int status = status_of_child([&] {
    if (is_socket(marked.get())) return 1;
    if (!is_socket(other.get())) return 2;
    // The number is taken, so that closing it closes nothing that came later.
    const int fresh = ::dup(other.get());
    if (fresh == marked.get()) return 3;
    marked.reset();
    return is_socket(fresh) ? 0 : 4;
  });
  REQUIRE(status == 0);
  REQUIRE(is_socket(marked.get()));

  // A child that lives does not keep the connection open.
  int pipe_ends[2];
  REQUIRE(::pipe(pipe_ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(pipe_ends[1]);
    ::_exit(::read(pipe_ends[0], &byte, 1) == 0 ? 0 : 1);
  }
  marked.reset();
  pollfd entry{other.get(), POLLIN, 0};
  REQUIRE(::poll(&entry, 1, 60000) == 1);  // the child may not have come to it yet
  char byte = 0;
  REQUIRE(::recv(other.get(), &byte, 1, 0) == 0);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
  int ended = 0;
  REQUIRE(::waitpid(child, &ended, 0) == child);
}

TEST_CASE("The number of a closed descriptor is not marked any more") {
  UniqueFd marked(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  close_in_children(marked.get());
  const int number = marked.get();
  marked.reset();
  const UniqueFd next(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(next.get() == number);
  REQUIRE(status_of_child([&] { return is_socket(next.get()) ? 0 : 1; }) == 0);
}
