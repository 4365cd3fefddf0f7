#pragma once

// Invariants: what can only be false if libddp itself is wrong. A mistake of the caller, a peer or
// the system gets an error of its own (error.h), not a check.
// Thread rule: any thread. For sources only: headers that users see carry no macros.
//
//   LIBDDP_CHECK(offset < size_, "offset past the end");

#include <string>

namespace libddp {

/// Throws Error: "libddp: internal error: <condition> does not hold (file:line): <detail>. Hint".
[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const std::string& detail);

}  // namespace libddp

/// `detail` is evaluated only when `condition` is false.
#define LIBDDP_CHECK(condition, detail)                                               \
  do {                                                                                \
    if (!(condition)) ::libddp::check_failed(#condition, __FILE__, __LINE__, detail); \
  } while (false)
