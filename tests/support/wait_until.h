#pragma once

// Looks until a condition holds, for ranks that are threads and must not run ahead of each other.
//
//   ++num_ready;
//   wait_until([&] { return num_ready == 3; });

#include <chrono>
#include <functional>
#include <thread>

#include "tests/support/expect.h"

namespace libddp::test {

inline void wait_until(const std::function<bool()>& holds,
                       std::chrono::seconds limit = std::chrono::seconds(20)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!holds()) {
    expect(std::chrono::steady_clock::now() < end, "what is waited for comes in time");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace libddp::test
