#pragma once

// For messages of several parts, in the test's own thread.
//
//   require_parts(message, {"rank 1", "Hint"});

#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp::test {

inline void require_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    INFO(text);
    INFO(part);
    REQUIRE(contains(text, part));
  }
}

}  // namespace libddp::test
