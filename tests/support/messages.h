#pragma once

// Messages of a communicator that are waited for, as a group's message queue does it.
//
//   send(fixture.comm(0), call, data, bytes, 1, tag);            // elsewhere:
//   const int source = recv(fixture.comm(1), call, data, bytes, 0, tag);

#include <cstdint>
#include <vector>

#include "libddp/collectives/comm.h"

namespace libddp::test {

/// Runs all parts to their end, in any order that the peers allow. A timeout of `call` fails the
/// communicator.
void exchange(Comm& comm, const CommCall& call, std::vector<Comm::Transfer> parts);
void send(Comm& comm, const CommCall& call, const void* data, std::uint64_t bytes, int target,
          int tag);
/// `source` -1 = any. Returns the source.
int recv(Comm& comm, const CommCall& call, void* data, std::uint64_t bytes, int source, int tag);

}  // namespace libddp::test
