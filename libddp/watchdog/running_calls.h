#pragma once

// The calls that run in the groups of this process, for peers that miss this rank in one of them:
// it may be stuck in a call of another group, which in turn waits for who asks.
//
// Thread rule: any thread. `describe` runs in the thread that asks, and must not make or end a
// RunningCall.
//
//   RunningCall registered([this] { return describe_running(); });   // as long as the group lives
//   std::string lines = running_calls();            // part of the answer to a question for stacks
//   notes += call_elsewhere(answer, "world", "(pid 4711 on host-a)");

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace libddp {

/// What a group says of itself.
struct RunningCallText {
  std::string group;
  /// "all_reduce #7 float32 [8] SUM"; empty = nothing runs.
  std::string call;
  /// "rank 0 (pid 4711 on host-a)", the ranks that have not come to it.
  std::vector<std::string> waits_for;
  /// "all_reduce #6 float32 [8] SUM": the last calls, which have ended or run, as ranks must agree
  /// on them.
  std::vector<std::string> last{};
};

class RunningCall {
 public:
  explicit RunningCall(std::function<RunningCallText()> describe);
  ~RunningCall();
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;

  const std::function<RunningCallText()> describe;
};

/// One line for each group in which a call runs, one for each that tells its last ones.
std::string running_calls();

/// Of another process's running_calls(): the call of `group`, or "".
std::string call_in(const std::string& answer, const std::string& group);

/// Of another process's running_calls(): the last calls of `group`, by number.
std::map<std::uint64_t, std::string> last_calls_in(const std::string& answer,
                                                   const std::string& group);

/// Of another process's running_calls(): ", in all_reduce #7 ... of group b, which waits for this
/// rank" for the first call of a group that is not `own_group`; empty if there is none. `me`: how
/// others know this process.
std::string call_elsewhere(const std::string& answer, const std::string& own_group,
                           const std::string& me);

}  // namespace libddp
