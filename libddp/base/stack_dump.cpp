#include "libddp/base/stack_dump.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <string_view>

namespace libddp {
namespace {

constexpr int kBriefCalls = 3;
std::atomic<StackDumper> installed_dumper{nullptr};

struct Call {
  std::string text;  // "load (data.py:31)"; empty for a line that tells of no call
  bool is_own = false;
};

/// Not of Python's library, of an installed package or frozen into the interpreter.
bool is_own_file(std::string_view path) {
  return !path.starts_with('<') && path.find("/lib/python3") == std::string_view::npos &&
         path.find("-packages/") == std::string_view::npos;
}

/// Of a line `  File "/a/data.py", line 31 in load`.
Call call_of(std::string_view line) {
  constexpr std::string_view kFile = "  File \"";
  constexpr std::string_view kLine = "\", line ";
  constexpr std::string_view kIn = " in ";
  if (!line.starts_with(kFile)) return {};
  const std::size_t path_end = line.find(kLine);
  if (path_end == std::string_view::npos) return {};
  const std::size_t number_begin = path_end + kLine.size();
  const std::size_t number_end = line.find(kIn, number_begin);
  if (number_end == std::string_view::npos) return {};
  const std::string_view path = line.substr(kFile.size(), path_end - kFile.size());
  const std::string_view file = path.substr(path.rfind('/') + 1);
  const std::string_view number = line.substr(number_begin, number_end - number_begin);
  const std::string_view function = line.substr(number_end + kIn.size());
  return {fmt::format("{} ({}:{})", function, file, number), is_own_file(path)};
}

/// The calls of one thread, innermost first.
class BriefStack {
 public:
  void add(const Call& call) {
    if (num_calls_ < kBriefCalls) {
      text_ += (text_.empty() ? "" : " < ") + call.text;
    } else if (call.is_own && !has_own_) {
      text_ += " < ... < " + call.text;
    }
    has_own_ = has_own_ || call.is_own;
    ++num_calls_;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  int num_calls_ = 0;
  bool has_own_ = false;
};

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
  BriefStack brief;
  std::size_t begin = 0;
  while (begin < dump.size()) {
    const std::size_t end = std::min(dump.find('\n', begin), dump.size());
    const std::string_view line = std::string_view(dump).substr(begin, end - begin);
    begin = end + 1;
    if (line.starts_with("Thread ") || line.starts_with("Current thread ")) brief = {};
    if (const Call call = call_of(line); !call.text.empty()) brief.add(call);
  }
  return brief.text();
}

}  // namespace libddp
