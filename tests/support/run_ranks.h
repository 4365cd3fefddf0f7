#pragma once

// Ranks as threads of this process: for logic, and for TSan, which cannot see across processes.
//
//   run_ranks(4, [&](int rank) { expect(work(rank) == 4, "work"); });

#include <chrono>
#include <functional>

namespace libddp::test {

/// Runs f(0) ... f(num_ranks - 1) at once and waits for all. Rethrows the first exception in time.
/// A rank that is not back by the deadline cannot be ended: the program then prints which ranks
/// hang and exits with status 124.
void run_ranks(int num_ranks, const std::function<void(int)>& f,
               std::chrono::seconds deadline = std::chrono::seconds(120));

}  // namespace libddp::test
