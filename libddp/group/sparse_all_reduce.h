#pragma once

// Sums of sparse COO tensors, whose number of entries differs between ranks.
//
// Every rank gets all ranks' entries and adds them in rank order, so the results are bit-identical.
// However many tensors there are, two messages do it: what each rank has, then the entries of all
// of them. bf16 and fp16 accumulate in fp32, within a rank and over the ranks. Synchronous.
// Thread rule: as a collective of the group; nothing else of the group may come between the two.
//
//   std::vector<at::Tensor> means = sparse_sums(*group, gradients, 1.0 / group->size());
//   sparse_all_reduce(*group, {embedding_grad}, {});

#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// The sums over all ranks, coalesced and in new memory, times `scale` (1 for integers).
/// `tensors`: sparse COO on the CPU; any number of entries, 0 too. The n-th one has the same sizes,
/// dtype and number of sparse dimensions on every rank; throws PeerError on every rank otherwise.
std::vector<at::Tensor> sparse_sums(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                                    double scale = 1.0, CallOptions options = {});

/// Each of `tensors` becomes the coalesced sum of all of them on all ranks.
void sparse_all_reduce(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                       CallOptions options);

/// A sparse tensor that is zero everywhere: sizes of `like`, which may be dense, and its dtype.
at::Tensor sparse_zeros(const at::Tensor& like, std::int64_t sparse_dim);

}  // namespace libddp
