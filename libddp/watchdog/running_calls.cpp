#include "libddp/watchdog/running_calls.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>

#include "libddp/watchdog/call_chain.h"

namespace libddp {
namespace {

constexpr std::string_view kInGroup = "libddp: in group ";
constexpr std::string_view kCall = " runs ";
constexpr std::string_view kWaits = ", waits for ";
constexpr std::string_view kOfGroup = "libddp: group ";
constexpr std::string_view kLast = " had ";

struct Registry {
  std::mutex mutex;
  std::vector<const RunningCall*> entries;
};

// Never destroyed: groups may outlive static objects.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

}  // namespace

RunningCall::RunningCall(std::function<RunningCallText()> describe)
    : describe(std::move(describe)) {
  const std::lock_guard lock(registry().mutex);
  registry().entries.push_back(this);
}

RunningCall::~RunningCall() {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().entries, this);
}

std::string running_calls() {
  std::string lines;
  const std::lock_guard lock(registry().mutex);
  for (const RunningCall* entry : registry().entries) {
    const RunningCallText text = entry->describe();
    if (!text.last.empty()) {
      lines += fmt::format("{}{}{}{}\n", kOfGroup, text.group, kLast,
                           fmt::join(text.last, kCallSeparator));
    }
    if (text.call.empty()) continue;
    lines += fmt::format("{}{}{}{}", kInGroup, text.group, kCall, text.call);
    if (!text.waits_for.empty()) {
      lines += fmt::format("{}{}", kWaits, fmt::join(text.waits_for, ", "));
    }
    lines += '\n';
  }
  return lines;
}

std::string call_in(const std::string& answer, const std::string& group) {
  const std::string prefix = fmt::format("{}{}{}", kInGroup, group, kCall);
  std::istringstream lines(answer);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(prefix)) {
      return line.substr(prefix.size(), line.find(kWaits) - prefix.size());
    }
  }
  return "";
}

std::map<std::uint64_t, std::string> last_calls_in(const std::string& answer,
                                                   const std::string& group) {
  const std::string prefix = fmt::format("{}{}{}", kOfGroup, group, kLast);
  std::istringstream lines(answer);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(prefix)) return calls_by_number(line.substr(prefix.size()));
  }
  return {};
}

std::string call_elsewhere(const std::string& answer, const std::string& own_group,
                           const std::string& me) {
  std::istringstream lines(answer);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(kInGroup)) continue;
    const std::size_t call = line.find(kCall, kInGroup.size());
    if (call == std::string::npos) continue;
    const std::string group = line.substr(kInGroup.size(), call - kInGroup.size());
    if (group == own_group) continue;
    const std::size_t waits = line.find(kWaits, call);
    const std::size_t begin = call + kCall.size();
    std::string text = fmt::format(", in {} of group {}", line.substr(begin, waits - begin), group);
    if (waits == std::string::npos) return text;
    if (line.find(me, waits) == std::string::npos) {
      return fmt::format("{}, which waits for {}", text, line.substr(waits + kWaits.size()));
    }
    return text + ", which waits for this rank: all ranks must call groups in the same order";
  }
  return "";
}

}  // namespace libddp
