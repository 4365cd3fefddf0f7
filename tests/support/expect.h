#pragma once

// Checks for code that runs in a rank's thread or process, where Catch2's assertions may not be
// used (they are neither thread-safe nor seen by the parent process): main.cpp ends a program that
// does.
//
//   run_ranks(3, [&](int rank) { expect(data[rank] == 6.0f, "sum"); });

#include <cstddef>
#include <ostream>
#include <stdexcept>
#include <string>

namespace libddp::test {

/// Throws std::runtime_error with `what` where `condition` is false.
inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected: " + what);
}

/// Every element is what `wanted(index)` says. One message, not one per element: under sanitizers
/// this loop is a test's time.
template <class Wanted>
void expect_all(const float* data, std::size_t count, const std::string& what, Wanted wanted) {
  std::size_t i = 0;
  while (i < count && data[i] == wanted(i)) ++i;
  expect(i == count, what + " at element " + std::to_string(i) + " of " + std::to_string(count));
}

/// Runs `call`, which must throw `Expected` (or a class derived from it); returns the message.
template <typename Expected, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  throw std::runtime_error("expected an exception, none was thrown");
}

/// Whether a text contains a part; a REQUIRE that fails shows both.
struct Contained {
  bool found;
  std::string text, part;
  operator bool() const { return found; }  // NOLINT: as a condition, everywhere
  friend std::ostream& operator<<(std::ostream& out, const Contained& it) {
    return out << '"' << it.text << "\" contains \"" << it.part << '"';
  }
};

/// True if `text` contains `part`; for messages in expect and REQUIRE.
inline Contained contains(const std::string& text, const std::string& part) {
  return {text.find(part) != std::string::npos, text, part};
}

}  // namespace libddp::test
