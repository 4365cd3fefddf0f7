#pragma once

// Waits until somebody listens at a TCP address, quietly. Thread rule: blocking; lets interrupts
// through.
//
//   wait_until_reachable("10.0.0.7", 29500, rank, std::chrono::minutes(5));

#include <chrono>
#include <cstdint>
#include <string>

namespace libddp {

/// Throws TimeoutError that names the address and what was wrong last (refused, no such host).
void wait_until_reachable(const std::string& host, std::uint16_t port, int rank,
                          std::chrono::milliseconds timeout);

}  // namespace libddp
