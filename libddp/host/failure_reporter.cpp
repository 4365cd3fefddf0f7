#include "libddp/host/failure_reporter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <utility>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/stack_dump.h"
#include "libddp/base/whole_file.h"
#include "libddp/watchdog/flight_log_json.h"
#include "libddp/watchdog/running_calls.h"

namespace libddp {
namespace {

constexpr std::chrono::milliseconds kAnswerTime{800};
constexpr std::size_t kMostStacks = 4;
constexpr int kMostRanks = 32;

/// A group's name may hold slashes.
std::string as_file_name(std::string name) {
  for (char& character : name) {
    const bool is_plain =
        std::isalnum(static_cast<unsigned char>(character)) || character == '-' || character == '_';
    if (!is_plain) character = '_';
  }
  return name;
}

std::string indented(const std::string& text) {
  std::string result = "    ";
  for (const char character : text) {
    result += character;
    if (character == '\n') result += "    ";
  }
  result.erase(result.find_last_not_of(" \n") + 1);
  return result + "\n";
}

}  // namespace

FailureReporter::FailureReporter(const GroupIdentity& identity,
                                 const std::vector<std::string>& peer_names, const Comm& comm,
                                 const FlightRecorder& flight_recorder,
                                 std::function<std::shared_ptr<Watchdog>()> watchdog)
    : identity_(identity),
      peer_names_(peer_names),
      comm_(comm),
      flight_recorder_(flight_recorder),
      watchdog_(std::move(watchdog)) {}

std::string FailureReporter::where_are(const std::vector<int>& ranks) {
  const std::shared_ptr<Watchdog> watchdog = watchdog_();
  if (!watchdog || ranks.empty()) return "";
  std::vector<int> asked = ranks;
  if (asked.size() > kMostStacks) asked.resize(kMostStacks);
  auto stacks = watchdog->ask_for_stacks(asked, kAnswerTime);
  const auto own = static_cast<std::size_t>(identity_.rank);
  const std::string me = peer_names_[own].substr(peer_names_[own].find('('));
  std::string text;
  for (const int rank : asked) {
    const auto found = stacks.find(rank);
    if (found == stacks.end()) {
      text += fmt::format("; rank {} does not answer", rank);
      continue;
    }
    const std::string brief = brief_stack(found->second);
    const std::string elsewhere = call_elsewhere(found->second, identity_.name, me);
    if (brief.empty() && elsewhere.empty()) continue;
    text += fmt::format("; rank {} is{}{}{}", rank, brief.empty() ? "" : " in ", brief,
                        brief.empty() ? elsewhere.substr(1) : elsewhere);
  }
  const std::lock_guard lock(stacks_mutex_);
  stacks_ = std::move(stacks);
  return text;
}

void FailureReporter::report(bool waits) noexcept {
  const auto failure = comm_.failure();
  if (!failure) return;
  try {
    // An error that all ranks meet is nobody's: who has one of its own does not come any more.
    const bool is_due = waits || failure->message.find(" aborted: ") == std::string::npos;
    if (is_due && !is_reported_.exchange(true) && writes_report(*failure)) {
      log_text(LogLevel::Error, report_text(*failure));
    }
    const auto folder = env_text("LIBDDP_FLIGHT_LOG_DIR");
    if (folder && !is_flight_written_.exchange(true)) {
      const std::string path = fmt::format("{}/flight-{}-rank{}.json", *folder,
                                           as_file_name(identity_.name), identity_.rank);
      write_whole_file(path, flight_log_json(flight_recorder_, identity_, failure->message));
    }
  } catch (const std::exception& error) {
    // The failure itself goes on to whoever called; this is about its description only.
    log(LogLevel::Error, "failure_report_failed", {{"reason", error.what()}});
  }
}

// One rank writes: the one whose own time was over, because it has asked for the stacks; where a
// peer is to blame, the lowest of the others, and where nobody is, rank 0. What this rank ended
// itself needs no report.
bool FailureReporter::writes_report(const GroupFailure& failure) const {
  if (failure.kind == GroupFailure::Kind::Timeout || failure.kind == GroupFailure::Kind::Device) {
    return true;
  }
  if (failure.kind == GroupFailure::Kind::Aborted) return false;
  const bool is_told = failure.message.find(" gave up: ") != std::string::npos ||
                       failure.message.find(" failed: ") != std::string::npos;
  return !is_told && identity_.rank == (failure.peer_rank == 0 ? 1 : 0);
}

std::string FailureReporter::report_text(const GroupFailure& failure) {
  std::string text = fmt::format("{} has failed: {}\n", identity_.where(), failure.message);
  const bool is_network = failure.kind == GroupFailure::Kind::Network;
  const char* other_end = is_network ? ", at the other end" : ", the one to blame";
  const int num_shown = std::min(identity_.world_size, kMostRanks);
  for (int rank = 0; rank < num_shown; ++rank) {
    const char* whose = rank == identity_.rank      ? ", this rank"
                        : rank == failure.peer_rank ? other_end
                                                    : "";
    text += fmt::format("  {}{}: last call {}\n", peer_names_[static_cast<std::size_t>(rank)],
                        whose, comm_.last_call_of(rank));
  }
  if (num_shown < identity_.world_size) {
    text += fmt::format("  and {} more ranks\n", identity_.world_size - num_shown);
  }
  const std::lock_guard lock(stacks_mutex_);
  for (const auto& [rank, stack] : stacks_) {
    if (stack.empty()) continue;
    text += fmt::format("  threads of {}:\n{}", peer_names_[static_cast<std::size_t>(rank)],
                        indented(stack));
  }
  return text;
}

}  // namespace libddp
