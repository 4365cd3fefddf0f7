#include "tests/support/fork_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <stdexcept>

#include "libddp/base/unique_fd.h"

namespace libddp::test {
namespace {

using Clock = std::chrono::steady_clock;

// One child. Its destructor leaves no process behind, whatever is thrown.
struct Child {
  Child() = default;
  Child(Child&&) = default;
  Child& operator=(Child&&) = delete;
  ~Child() {
    if (pid > 0 && output) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  pid_t pid = 0;
  UniqueFd output;  // open until the child is reaped
  RankResult result;
};

void write_all(int fd, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(fd, text.data() + at, text.size() - at);
    if (written < 0 && errno != EINTR) return;
    if (written > 0) at += static_cast<std::size_t>(written);
  }
}

[[noreturn]] void run_child(int rank, int output, pid_t parent,
                            const std::function<std::string(int)>& f) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(2);
  // Catch2 installs handlers that report a crash as the parent's.
  for (int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGTERM, SIGINT}) {
    ::signal(signal, SIG_DFL);
  }
  int status = 0;
  std::string text;
  try {
    text = f(rank);
  } catch (const std::exception& error) {
    status = 1;
    text = error.what();
  } catch (...) {
    status = 1;
    text = "unknown exception";
  }
  write_all(output, text);
  ::_exit(status);  // not exit(): the parent's static objects and buffers are not the child's
}

Child start_child(int rank, const std::function<std::string(int)>& f) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("fork_ranks: pipe2 failed");
  Child child;
  child.output.reset(ends[0]);
  UniqueFd input(ends[1]);
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  child.pid = ::fork();
  if (child.pid < 0) throw std::runtime_error("fork_ranks: fork failed");
  if (child.pid == 0) {
    child.output.reset();
    run_child(rank, input.get(), parent, f);
  }
  return child;
}

void read_output(Child& child) {
  char buffer[4096];
  const ssize_t size = ::read(child.output.get(), buffer, sizeof(buffer));
  if (size > 0) {
    child.result.text.append(buffer, static_cast<std::size_t>(size));
    return;
  }
  if (size < 0 && errno == EINTR) return;
  // End of file: the child is gone or going.
  int status = 0;
  while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) child.result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) child.result.signal = WTERMSIG(status);
  child.output.reset();
}

// False when no child is left.
bool wait_for_output(std::vector<Child>& children, int timeout_ms) {
  std::vector<pollfd> polled;
  std::vector<Child*> owners;
  for (Child& child : children) {
    if (!child.output) continue;
    polled.push_back({child.output.get(), POLLIN, 0});
    owners.push_back(&child);
  }
  if (polled.empty()) return false;
  if (::poll(polled.data(), polled.size(), timeout_ms) > 0) {
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents != 0) read_output(*owners[i]);
    }
  }
  return true;
}

}  // namespace

std::vector<RankResult> fork_ranks(int num_ranks, const std::function<std::string(int)>& f,
                                   std::chrono::seconds deadline) {
  std::vector<Child> children;
  children.reserve(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) children.push_back(start_child(rank, f));

  const Clock::time_point end = Clock::now() + deadline;
  while (wait_for_output(children, 100)) {
    if (Clock::now() < end) continue;
    for (Child& child : children) {
      if (!child.output || child.result.timed_out) continue;
      child.result.timed_out = true;
      ::kill(child.pid, SIGKILL);
    }
  }
  std::vector<RankResult> results;
  for (Child& child : children) results.push_back(std::move(child.result));
  return results;
}

}  // namespace libddp::test
