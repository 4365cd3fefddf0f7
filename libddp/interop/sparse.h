#pragma once

// All-reduce SUM of sparse COO tensors, whose number of entries differs between ranks.
//
// Every rank gathers all ranks' indices and values and sums them in rank order, so the results are
// bit-identical. Synchronous: it takes three collectives, and nothing else of the group may come
// between them.
// Thread rule: as a collective of the group.
//
//   sparse_all_reduce(*group, {embedding_grad}, {});

#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// Each of `tensors` becomes the coalesced sum of all of them on all ranks.
void sparse_all_reduce(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                       CallOptions options);

}  // namespace libddp
