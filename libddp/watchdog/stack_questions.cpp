#include "libddp/watchdog/stack_questions.h"

#include <algorithm>
#include <utility>

#include "libddp/base/stack_dump.h"
#include "libddp/watchdog/running_calls.h"

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

std::map<int, std::string> StackQuestions::ask(const std::vector<int>& ranks,
                                               std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (is_stopped_) return {};
  const ControlMessage question{.kind = ControlMessage::Kind::StacksWanted, .number = ++number_};
  stacks_.clear();
  std::size_t num_asked = 0;
  for (ControlChannels::Channel& channel : channels_.all()) {
    if (std::find(ranks.begin(), ranks.end(), channel.peer.rank) == ranks.end()) continue;
    if (channels_.send_to(channel, question)) ++num_asked;
  }
  came_.wait_for(lock, limit, [&] { return is_stopped_ || stacks_.size() >= num_asked; });
  return std::exchange(stacks_, {});
}

void StackQuestions::answer(ControlChannels::Channel& channel, std::uint64_t number) {
  ControlMessage answer{.kind = ControlMessage::Kind::Stacks, .number = number};
  std::string& text = answer.failure.message;
  text = running_calls();
  if (text.size() > kMostCalls) text.resize(text.rfind('\n', kMostCalls) + 1);
  text += end_of(dump_stacks(), ControlMessage::kMaxText - text.size());
  channels_.send_to(channel, answer);
}

void StackQuestions::take(int rank, const ControlMessage& message) {
  const std::lock_guard lock(mutex_);
  if (message.number != number_) return;
  stacks_.insert_or_assign(rank, message.failure.message);
  came_.notify_all();
}

void StackQuestions::stop() {
  const std::lock_guard lock(mutex_);
  is_stopped_ = true;
  came_.notify_all();
}

}  // namespace libddp
