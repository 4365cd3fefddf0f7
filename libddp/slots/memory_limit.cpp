#include "libddp/slots/memory_limit.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

namespace libddp {
namespace {

std::optional<std::uint64_t> number_in(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  std::uint64_t number = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), number);
  if (end.ec != std::errc()) return std::nullopt;  // "max" is one such
  return number;
}

/// What follows `name` at the start of a line of a file; nothing if there is no such number.
std::optional<std::uint64_t> number_of(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (std::string_view(line).substr(0, name.size()) != name) continue;
    return number_in(std::string_view(line).substr(name.size()));
  }
  return std::nullopt;
}

/// The path below the root of control groups (version 2) of this process.
std::string control_group(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.substr(0, 3) == "0::") return line.substr(3);
  }
  return "";
}

void lower(MemoryLimit& limit, std::uint64_t bytes, std::string source) {
  if (bytes >= limit.available_bytes) return;
  limit = {.available_bytes = bytes, .source = std::move(source)};
}

}  // namespace

MemoryLimit memory_limit() { return memory_limit_in(""); }

MemoryLimit memory_limit_in(const std::string& root) {
  MemoryLimit limit{.available_bytes = std::numeric_limits<std::uint64_t>::max(), .source = ""};
  if (const auto kib = number_of(root + "/proc/meminfo", "MemAvailable:")) {
    lower(limit, *kib * 1024, "the machine");
  }
  std::string path = control_group(root);
  while (true) {
    const std::string folder = root + "/sys/fs/cgroup" + (path == "/" ? "" : path);
    const auto most = number_of(folder + "/memory.max", "");
    const auto used = number_of(folder + "/memory.current", "");
    if (most && used) {
      const std::uint64_t cache = number_of(folder + "/memory.stat", "inactive_file ").value_or(0);
      const std::uint64_t taken = *used - std::min(*used, cache);
      lower(limit, *most - std::min(*most, taken),
            "the control group " + (path.empty() ? "/" : path));
    }
    if (path.empty() || path == "/") return limit;
    path.erase(path.rfind('/'));
  }
}

}  // namespace libddp
