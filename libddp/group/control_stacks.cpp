// Questions for the stacks of other ranks, and their answers: from watcher to watcher, so that a
// rank answers whatever its own threads are stuck in.

#include <algorithm>
#include <utility>

#include "libddp/base/stack_dump.h"
#include "libddp/group/control_watcher.h"

namespace libddp {

std::map<int, std::string> ControlWatcher::ask_for_stacks(const std::vector<int>& ranks,
                                                          std::chrono::milliseconds limit) {
  std::unique_lock lock(stacks_mutex_);
  const std::uint64_t number = ++question_;
  stacks_.clear();
  std::size_t num_asked = 0;
  {
    std::lock_guard send_lock(send_mutex_);
    for (const Watched& watched : watched_) {
      if (std::find(ranks.begin(), ranks.end(), watched.peer.rank) == ranks.end()) continue;
      const ControlMessage question{.kind = ControlMessage::Kind::StacksWanted, .number = number};
      if (send_control(watched.peer.control.get(), question)) ++num_asked;
    }
  }
  stacks_came_.wait_for(lock, limit, [&] { return stacks_.size() >= num_asked; });
  return std::exchange(stacks_, {});
}

void ControlWatcher::answer_stacks(const Watched& watched, std::uint64_t number) {
  ControlMessage answer{.kind = ControlMessage::Kind::Stacks, .number = number};
  answer.failure.message = dump_stacks();
  // The end of it counts: Python names the main thread last.
  std::string& text = answer.failure.message;
  if (text.size() > ControlMessage::kMaxText) {
    const std::size_t line = text.find('\n', text.size() - ControlMessage::kMaxText);
    text.erase(0, line == std::string::npos ? 0 : line + 1);
  }
  std::lock_guard lock(send_mutex_);
  send_control(watched.peer.control.get(), answer);
}

void ControlWatcher::take_stacks(int rank, const ControlMessage& message) {
  std::lock_guard lock(stacks_mutex_);
  if (message.number != question_) return;
  stacks_.insert_or_assign(rank, message.failure.message);
  stacks_came_.notify_all();
}

}  // namespace libddp
