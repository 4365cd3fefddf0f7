#pragma once

// Groups for tests: ranks as threads over one HashStore, or as forked processes over a FileStore.
//
//   run_group(3, [](ProcessGroup& group) {
//     at::Tensor t = input_of(group.rank(), {5}, at::kFloat);
//     group.all_reduce(t);
//     expect_equal(t, expected_sum, "sum");
//   });

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "libddp/group/process_group.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/run_ranks.h"

namespace libddp::test {

/// Runs `f` on every rank as a thread; each rank shuts its group down after it. A rank that throws
/// drops its group, which ends the others.
void run_group(int world_size, const std::function<void(ProcessGroup&)>& f,
               std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// The same on several hosts that are only names: ranks with equal numbers share one.
void run_group_on_hosts(const std::vector<int>& host_of,
                        const std::function<void(ProcessGroup&)>& f,
                        std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Forks the ranks; f(group) returns what the parent sees as text. The group of a rank lives until
/// f is over and is dropped without shutdown unless f does it.
std::vector<RankResult> fork_group(int world_size, const std::function<std::string(Group)>& f,
                                   std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Deterministic small integers that differ from rank to rank, exact in every dtype.
at::Tensor input_of(int rank, at::IntArrayRef sizes, at::ScalarType dtype);
/// Inputs of all ranks, stacked, in the widest type of their kind.
at::Tensor all_inputs(int world_size, at::IntArrayRef sizes, at::ScalarType dtype);
/// What torch computes for a reduction over them.
at::Tensor reduced(int world_size, at::IntArrayRef sizes, at::ScalarType dtype, ReduceOp op);

/// fp32, every element the same.
at::Tensor filled(double value, std::int64_t numel = 8);
/// The first element of an fp32 tensor.
double first(const at::Tensor& tensor);

/// Throws, naming `what` and the tensors, unless they are equal bit for bit and in dtype.
void expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what);

}  // namespace libddp::test
