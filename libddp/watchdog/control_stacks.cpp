// Questions for the stacks of other ranks, and their answers: from watchdog to watchdog, so that a
// rank answers whatever its own threads are stuck in.

#include <algorithm>
#include <utility>

#include "libddp/base/stack_dump.h"
#include "libddp/watchdog/running_calls.h"
#include "libddp/watchdog/watchdog.h"

namespace libddp {

namespace {

constexpr std::size_t kMostCalls = 1000;

// Whole lines of it: Python names the main thread last.
std::string end_of(std::string text, std::size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  const std::size_t line = text.find('\n', text.size() - most_bytes);
  return line == std::string::npos ? "" : text.substr(line + 1);
}

}  // namespace

std::map<int, std::string> Watchdog::ask_for_stacks(const std::vector<int>& ranks,
                                                    std::chrono::milliseconds limit) {
  std::unique_lock lock(stacks_mutex_);
  if (is_stopped_) return {};
  const std::uint64_t number = ++question_;
  stacks_.clear();
  std::size_t num_asked = 0;
  {
    std::lock_guard send_lock(send_mutex_);
    for (Watched& watched : watched_) {
      if (std::find(ranks.begin(), ranks.end(), watched.peer.rank) == ranks.end()) continue;
      const ControlMessage question{.kind = ControlMessage::Kind::StacksWanted, .number = number};
      if (send_to(watched, question)) ++num_asked;
    }
  }
  stacks_came_.wait_for(lock, limit, [&] { return is_stopped_ || stacks_.size() >= num_asked; });
  return std::exchange(stacks_, {});
}

void Watchdog::answer_stacks(Watched& watched, std::uint64_t number) {
  ControlMessage answer{.kind = ControlMessage::Kind::Stacks, .number = number};
  std::string& text = answer.failure.message;
  text = running_calls();
  if (text.size() > kMostCalls) text.resize(text.rfind('\n', kMostCalls) + 1);
  text += end_of(dump_stacks(), ControlMessage::kMaxText - text.size());
  std::lock_guard lock(send_mutex_);
  send_to(watched, answer);
}

void Watchdog::take_stacks(int rank, const ControlMessage& message) {
  std::lock_guard lock(stacks_mutex_);
  if (message.number != question_) return;
  stacks_.insert_or_assign(rank, message.failure.message);
  stacks_came_.notify_all();
}

}  // namespace libddp
