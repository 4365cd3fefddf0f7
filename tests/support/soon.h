#pragma once

// The deadline of what a test waits for: whatever takes longer hangs. A busy machine may stand
// still for seconds.

#include <chrono>

#include "libddp/base/deadline.h"

namespace libddp::test {

inline Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

}  // namespace libddp::test
