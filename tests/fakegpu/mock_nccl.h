#pragma once

// An NCCL without GPUs: a table for libddp::NcclApi whose communicators reduce and move the fake
// device's memory over Unix sockets, between threads of one process, forked or started processes.
//
// As NCCL has it: operations run in the order of their stream, and one communicator's in the order
// of their calls, whatever streams; initialisation blocks until all ranks have come (with
// config.blocking = 0 in the background); calls that do not match hang until an abort, as does what
// a rank that died or aborted has not done; an abort ends everything of its communicator with
// undefined data. Reductions add in rank order, half precisions in float with one rounding.
// Thread rule: any thread; a communicator as NCCL allows.
//
//   mock_nccl::install();
//   mock_nccl::fail("all_reduce", 3, ncclSystemError);   // the third call of any rank
//   mock_nccl::hang(2, 0);                               // rank 0's second operation
//   ... what uses libddp::NcclApi::get() ...
//   REQUIRE(mock_nccl::live().communicators == 0);
//   mock_nccl::reset();

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libddp/cuda/nccl_api.h"

namespace mock_nccl {

const libddp::NcclApi& api();
/// NcclApi::get() gives api() from now on.
void install();
void uninstall();

/// Forgets what was asked for, counts and the list of operations. What hangs already goes on to.
void reset();

// Failures. A function has its name in the table ("all_reduce"); a call or an operation is counted
// from 1 since the last reset, over all ranks of the process or, with a rank, for that one.

/// The nth call gives `result` and does nothing.
void fail(const std::string& function, int nth_call, ncclResult_t result, int rank = -1);
/// The nth operation (a call, or a group's calls on one communicator) never ends by itself.
void hang(int nth_operation, int rank = -1);
/// The nth operation moves nothing and ends without the other ranks, as one of few elements may
/// whose counts differ.
void end_alone(int nth_operation, int rank);
/// comm_init_rank_scalable does not come back.
void hang_init(int rank = -1);
/// comm_get_async_error gives `result` once the nth operation has been issued.
void fail_async(int nth_operation, ncclResult_t result, int rank = -1);
/// Runs in the call that issues the nth operation, behind its issue.
void meanwhile(int nth_operation, int rank, std::function<void()> function);
/// Each operation takes that much longer.
void delay(int milliseconds);
/// What the table says from the next install on. Before 2.24 there are no 8-bit floats.
void set_version(int version);

/// Calls of a function since the reset.
int calls(const std::string& function, int rank = -1);

/// One call of an operation, in the order in which they were issued.
struct Issued {
  std::string function;
  int rank;
  /// Counts the communicators of a process.
  int communicator;
  /// Calls with one number were issued together (group_start).
  int operation;
  c10::Stream stream;
  ncclDataType_t dtype;
  std::size_t count;
  /// Root or peer; -1 where there is none.
  int peer;
  ncclRedOp_t reduction;
};
std::vector<Issued> issued();

/// Blocks until no other rank needs the process any more that made the unique id, for five seconds
/// at most. Runs by itself at exit; a process that ends with _exit calls it.
void wait_for_ranks();

/// What has not been given back in this process.
struct Live {
  int communicators = 0;
  int memory = 0;
  int registrations = 0;
  int reductions = 0;
};
Live live();

}  // namespace mock_nccl
