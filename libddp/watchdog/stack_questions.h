#pragma once

// Questions for the stacks of other ranks, and their answers: from watchdog to watchdog, so that a
// rank answers whatever its own threads are stuck in.
// Thread rule: `ask` and `stop` from any thread but the watchdog's, `answer` and `take` from that.
//
//   std::map<int, std::string> stacks = questions.ask({2, 5}, std::chrono::milliseconds(800));

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "libddp/watchdog/control_channels.h"

namespace libddp {

class StackQuestions {
 public:
  explicit StackQuestions(ControlChannels& channels) : channels_(channels) {}

  /// What the threads of `ranks` do, by rank; of those that answer within `limit`. Text of
  /// stack_dump.h, empty for a program without Python.
  std::map<int, std::string> ask(const std::vector<int>& ranks, std::chrono::milliseconds limit);
  /// Sends what the threads of this process do, and what runs in its groups.
  void answer(ControlChannels::Channel& channel, std::uint64_t number);
  /// An answer that has come.
  void take(int rank, const ControlMessage& message);
  /// No answers will come any more.
  void stop();

 private:
  ControlChannels& channels_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::uint64_t number_ = 0;
  std::map<int, std::string> stacks_;
  bool is_stopped_ = false;
};

}  // namespace libddp
