#include "libddp/base/stack_dump.h"

#include <algorithm>
#include <atomic>
#include <string_view>

namespace libddp {
namespace {

constexpr int kBriefCalls = 3;
std::atomic<StackDumper> installed_dumper{nullptr};

/// `  File "/a/data.py", line 31 in load` as "load (data.py:31)"; empty for any other line.
std::string brief_call(std::string_view line) {
  constexpr std::string_view kFile = "  File \"";
  constexpr std::string_view kLine = "\", line ";
  constexpr std::string_view kIn = " in ";
  if (!line.starts_with(kFile)) return "";
  const std::size_t path_end = line.find(kLine);
  if (path_end == std::string_view::npos) return "";
  const std::size_t number = path_end + kLine.size();
  const std::size_t number_end = line.find(kIn, number);
  if (number_end == std::string_view::npos) return "";
  const std::string_view path = line.substr(kFile.size(), path_end - kFile.size());
  const std::string_view file = path.substr(path.rfind('/') + 1);
  return std::string(line.substr(number_end + kIn.size())) + " (" + std::string(file) + ":" +
         std::string(line.substr(number, number_end - number)) + ")";
}

}  // namespace

StackDumper set_stack_dumper(StackDumper dumper) { return installed_dumper.exchange(dumper); }

std::string dump_stacks() noexcept {
  try {
    const StackDumper dumper = installed_dumper.load();
    return dumper ? dumper() : "";
  } catch (...) {
    return "";
  }
}

std::string brief_stack(const std::string& dump) {
  std::string brief;
  int num_calls = 0;
  std::size_t begin = 0;
  while (begin < dump.size()) {
    const std::size_t end = std::min(dump.find('\n', begin), dump.size());
    const std::string_view line = std::string_view(dump).substr(begin, end - begin);
    begin = end + 1;
    if (line.starts_with("Thread ") || line.starts_with("Current thread ")) {
      brief.clear();
      num_calls = 0;
      continue;
    }
    const std::string call = brief_call(line);
    if (call.empty() || ++num_calls > kBriefCalls) continue;
    brief += (brief.empty() ? "" : " < ") + call;
  }
  return brief;
}

}  // namespace libddp
