#include "libddp/keeper/start_keeper.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <optional>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/base/printable.h"

extern "C" char** environ;

namespace libddp {
namespace {

constexpr std::chrono::milliseconds kRetryPause{5};

/// Of an installation bin/libddp-keeper, where the library that has this function is lib/libddp.so;
/// of a build in the same folder.
std::string installed_program() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&connect_or_start), &info) == 0) return "";
  const std::string folder = folder_of(info.dli_fname);
  const std::string built = folder + "/libddp-keeper";
  return ::access(built.c_str(), X_OK) == 0 ? built : folder_of(folder) + "/bin/libddp-keeper";
}

std::string program_of(const KeeperStart& start) {
  std::string program = start.program;
  if (program.empty()) program = env_text("LIBDDP_KEEPER").value_or("");
  if (program.empty()) program = installed_program();
  if (::access(program.c_str(), X_OK) == 0) return program;
  throw StateError(fmt::format(
      "libddp snapshot: the program of the keeper, {}, cannot be run: {}. Hint: install libddp "
      "anew, or name the program in LIBDDP_KEEPER.",
      printable(program), std::strerror(errno)));
}

/// Input from nowhere, output to nowhere or to the log: whoever waits for the end of the caller's
/// output waits for the caller alone.
class SpawnSetup {
 public:
  SpawnSetup() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    const std::string log = env_text("LIBDDP_KEEPER_LOG").value_or("/dev/null");
    ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
  }
  ~SpawnSetup() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnSetup(const SpawnSetup&) = delete;
  SpawnSetup& operator=(const SpawnSetup&) = delete;

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

pid_t spawn(const KeeperStart& start) {
  const std::string program = program_of(start);
  const std::string linger = fmt::format("{:.3f}", static_cast<double>(start.linger.count()) / 1e3);
  const std::string rate =
      std::to_string(env_integer("LIBDDP_REPLICA_BYTES_PER_SECOND", 0, LONG_MAX).value_or(0));
  const SpawnSetup setup;
  const char* const arguments[] = {program.c_str(), start.run.c_str(),    "--linger",
                                   linger.c_str(),  "--bytes-per-second", rate.c_str(),
                                   nullptr};
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, program.c_str(), &setup.actions, &setup.attributes,
                                  const_cast<char* const*>(arguments), environ);
  if (error == 0) return pid;
  throw StateError(fmt::format("libddp snapshot: the keeper {} could not be started: {}.",
                               printable(program), std::strerror(error)));
}

/// How a keeper that did not stay ended; another one's name is no failure.
void check_running(pid_t keeper, const KeeperStart& start) {
  constexpr int kAnotherIsThere = 2;
  int status = 0;
  if (::waitpid(keeper, &status, WNOHANG) != keeper) return;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kAnotherIsThere) return;
  throw StateError(fmt::format(
      "libddp snapshot: the keeper {} ended at once ({} {}). Hint: set LIBDDP_KEEPER_LOG to a file "
      "and look what it says there.",
      printable(program_of(start)), WIFEXITED(status) ? "exit status" : "signal",
      WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status)));
}

}  // namespace

KeeperClient connect_or_start(const KeeperStart& start, const KeeperClient::Role& role,
                              Deadline deadline) {
  std::optional<pid_t> spawned;
  while (true) {
    try {
      return KeeperClient(start.run, role, deadline);
    } catch (const NetworkError&) {
      if (deadline.expired()) throw;
    }
    if (spawned) {
      check_running(*spawned, start);
    } else {
      spawned = spawn(start);
    }
    ::poll(nullptr, 0, static_cast<int>(kRetryPause.count()));
  }
}

pid_t launching_agent() {
  // torchrun's agent is the parent of its workers; so is libddp run, unless it says otherwise.
  if (const auto launcher = env_integer("LIBDDP_LAUNCHER_PID", 1, INT_MAX)) {
    return static_cast<pid_t>(*launcher);
  }
  return env_text("TORCHELASTIC_RUN_ID") ? ::getppid() : 0;
}

}  // namespace libddp
