#pragma once

// Sums of sparse COO tensors, whose number of entries differs between ranks.
//
// Every rank gets all ranks' entries and adds them in rank order, so the results are bit-identical.
// However many tensors there are, two steps do it: what each rank has, then the entries of all of
// them. bf16 and fp16 accumulate in fp32, within a rank and over the ranks.
// Thread rule: as a collective of the group. `sparse_sums` is synchronous, and nothing else of the
// group may come between its two; SparseSum is for who must not wait.
//
//   std::vector<at::Tensor> means = sparse_sums(*group, gradients, 1.0 / group->size());

#include <memory>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

/// The sums over all ranks, coalesced and in new memory, times `scale` (1 for integers).
/// `tensors`: sparse COO; from a device they go through the host, which blocks; any number of
/// entries, 0 too. The n-th one has the same sizes, dtype and number of sparse dimensions on every
/// rank; throws PeerError on every rank otherwise.
std::vector<at::Tensor> sparse_sums(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                                    double scale = 1.0, CallOptions options = {});

/// Each of `tensors` becomes the coalesced sum of all of them on all ranks.
void sparse_all_reduce(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                       CallOptions options);

/// One sum, step by step. The entries travel as messages, not as a collective, so that the second
/// step may be issued when the first has ended, whatever was issued in between.
///
///   SparseSum sum(group, tensor);
///   sum.gather_layouts({})->wait();
///   if (auto parts = sum.messages(); !parts.empty()) group->exchange(std::move(parts))->wait();
///   at::Tensor result = sum.add();
class SparseSum {
 public:
  /// Tag of the messages.
  static constexpr int kTag = 0x7fff0001;

  SparseSum(Group group, const at::Tensor& tensor);
  ~SparseSum();

  WorkPtr gather_layouts(const CallOptions& options);
  /// May be empty: there are no entries anywhere, or no other rank. PeerError: types differ.
  std::vector<Exchange> messages();
  at::Tensor add() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A sparse tensor that is zero everywhere: sizes of `like`, which may be dense, and its dtype.
at::Tensor sparse_zeros(const at::Tensor& like, std::int64_t sparse_dim);

}  // namespace libddp
