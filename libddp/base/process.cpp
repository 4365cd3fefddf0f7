#include "libddp/base/process.h"

#include <pthread.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <vector>

#include "libddp/base/env.h"

namespace libddp {
namespace {

std::atomic<std::uint64_t> generation{0};

void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

std::string link_target(const char* path) {
  char target[64];
  const ssize_t size = ::readlink(path, target, sizeof(target));
  return size > 0 ? std::string(target, static_cast<std::size_t>(size)) : std::string();
}

/// Number of the first field that stat_fields() has.
constexpr std::size_t kFirstField = 3;

/// What /proc/PID/stat says behind the program's name, which may hold anything, parentheses too:
/// "4711 (name) S ..." (proc_pid_stat(5)). None where there is no such process.
std::vector<std::string> stat_fields(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  return {std::istream_iterator<std::string>(fields), {}};
}

}  // namespace

std::string host_name() {
  utsname names{};
  if (::uname(&names) != 0) return "unknown";
  return names.nodename;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string machine_id() {
  const std::optional<std::string> given = env_text("LIBDDP_HOST_ID");
  return given ? "LIBDDP_HOST_ID=" + *given : boot_id();
}

std::string network_namespace() { return link_target("/proc/self/ns/net"); }

std::string pid_namespace() { return link_target("/proc/self/ns/pid"); }

char process_state(pid_t pid) {
  const std::vector<std::string> fields = stat_fields(pid);
  return fields.empty() ? '\0' : fields[0][0];
}

std::string process_begin(pid_t pid) {
  constexpr std::size_t kBegin = 22 - kFirstField;
  const std::vector<std::string> fields = stat_fields(pid);
  return fields.size() > kBegin ? fields[kBegin] : "";
}

std::uint64_t fork_generation() {
  // Registered on first use: whoever wants to notice a fork has called this before it.
  static const int registered = ::pthread_atfork(nullptr, nullptr, count_fork);
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace libddp
