#pragma once

// Says in the log whom an acceptor has not let in: one line a second at most, with how many there
// were. Thread rule: one thread.
//
//   RefusalLog refusals("link_refused", "10.0.0.1:4711");
//   refusals.report("wrong proof");

#include <string>
#include <utility>

#include "libddp/base/deadline.h"

namespace libddp {

class RefusalLog {
 public:
  /// `endpoint`: where the acceptor is.
  RefusalLog(std::string event, std::string endpoint)
      : event_(std::move(event)), endpoint_(std::move(endpoint)) {}

  void report(const std::string& reason);

 private:
  const std::string event_;
  const std::string endpoint_;
  Deadline next_ = Deadline::after(std::chrono::milliseconds(0));
  long num_refused_ = 0;
};

}  // namespace libddp
