#pragma once

// How far a rank is on its way out of a group, as it tells its peers. Thread rule: a value.
//
//   message.number = departure.bits();
//   Departure departure = Departure::from_bits(message.number);

#include <cstdint>

namespace libddp {

struct Departure {
  /// Of messages that a program sends: it has none left, and makes no new ones.
  bool sends_nothing = false;
  bool receives_nothing = false;
  /// It makes no new ones, and those that it has have not moved for long.
  bool is_stuck = false;
  /// Not for collectives either: a goodbye, which is a message of its own.
  bool has_left = false;

  bool operator==(const Departure&) const = default;

  std::uint64_t bits() const {
    return (sends_nothing ? 1u : 0u) | (receives_nothing ? 2u : 0u) | (is_stuck ? 4u : 0u);
  }
  static Departure from_bits(std::uint64_t bits) {
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
  }
};

}  // namespace libddp
