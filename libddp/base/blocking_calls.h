#pragma once

// Makes calls that may not return for long, or never (a name server or a store that is gone), for
// waiters that must go on.
//
// The calls run one after another in a thread of their own. Who waits for one looks around ten
// times a second and gives it up at the deadline, when `look` throws, or at Ctrl-C. A call that was
// given up still runs, so it must own whatever it touches: values and shared pointers, never a
// reference into its waiter's frame. While it runs the next calls wait behind it.
// Thread rule: any thread.
//
//   BlockingCalls calls("libddp-store");
//   const auto sum = calls.run<long>([store, key] { return store->add(key, 1); }, deadline);
//   if (!sum) give_up(calls.hanging_for());   // it did not come in time

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "libddp/base/deadline.h"

namespace libddp {

class BlockingCalls {
 public:
  using Look = std::function<void()>;

  /// `name`: of the thread, which begins with the first call.
  explicit BlockingCalls(std::string name);
  /// Waits for nobody: a call that hangs is left behind with all that it owns.
  ~BlockingCalls();
  BlockingCalls(const BlockingCalls&) = delete;
  BlockingCalls& operator=(const BlockingCalls&) = delete;

  /// What `call` returns or throws; nothing if that does not come by the deadline.
  template <typename T>
  std::optional<T> run(std::function<T()> call, Deadline deadline, const Look& look = nullptr) {
    auto result = std::make_shared<std::optional<T>>();
    const bool is_done =
        wait_for([result, call = std::move(call)] { result->emplace(call()); }, deadline, look);
    return is_done ? std::move(*result) : std::nullopt;
  }

  /// For how long a call that was given up has been running; nothing if none is.
  std::optional<std::chrono::duration<double>> hanging_for() const;

 private:
  struct Job;
  struct State;

  bool wait_for(std::function<void()> work, Deadline deadline, const Look& look);
  static void serve(const std::shared_ptr<State>& state);

  const std::string name_;
  const std::shared_ptr<State> state_;
};

}  // namespace libddp
