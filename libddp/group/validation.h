#pragma once

// The checks of arguments that concern more than one tensor: ranks, ops, sizes, lists.
//
// Each check costs a few comparisons; text is made only when it fails. All throw ArgumentError,
// before any byte moves, naming group, rank, operation and argument.
// Thread rule: free functions.
//
//   CallSite site{identity, "broadcast"};
//   check_rank(site, "root", root);

#include <ATen/core/Tensor.h>

#include <chrono>
#include <optional>
#include <vector>

#include "libddp/base/reduce_op.h"
#include "libddp/group/operand.h"

namespace libddp {

/// `rank` is one of the group's.
void check_rank(const CallSite& site, const char* argument, int rank);
/// One of the group's and not the own one.
void check_peer(const CallSite& site, const char* argument, int rank);
void check_tag(const CallSite& site, int tag);
/// The op and the scale make sense for the dtype.
void check_reduction(const CallSite& site, const at::Tensor& tensor, ReduceOp op, double scale);
/// Both tensors have one dtype.
void check_same_dtype(const CallSite& site, const char* argument, const at::Tensor& tensor,
                      const char* other_argument, const at::Tensor& other);
/// Both tensors have one number of elements.
void check_same_numel(const CallSite& site, const char* argument, const at::Tensor& tensor,
                      const char* other_argument, const at::Tensor& other);
/// Each tensor of a list has the dtype and the number of elements of another one.
void check_like(const CallSite& site, const char* list, const std::vector<at::Tensor>& tensors,
                const char* argument, const at::Tensor& tensor);
/// No size of a tensor to be made is negative.
void check_sizes(const CallSite& site, at::IntArrayRef sizes);
/// `whole` holds world_size blocks of the size of `part`.
void check_blocks(const CallSite& site, const char* whole_argument, const at::Tensor& whole,
                  const char* part_argument, const at::Tensor& part);
/// If the tensors share memory, `part` is exactly the block of this rank in `whole`.
void check_overlap(const CallSite& site, const char* whole_argument, const at::Tensor& whole,
                   const char* part_argument, const at::Tensor& part);
/// One tensor per rank.
void check_list(const CallSite& site, const char* argument, const std::vector<at::Tensor>& list);
/// No tensor: the list belongs to the root only.
void check_empty_list(const CallSite& site, const char* argument,
                      const std::vector<at::Tensor>& list, int root);
/// Rows per rank: given ones must add up to dim 0; empty = even, which must divide it.
std::vector<std::int64_t> check_splits(const CallSite& site, const char* argument,
                                       const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& splits);
std::chrono::milliseconds check_timeout(const CallSite& site,
                                        std::optional<std::chrono::milliseconds> timeout,
                                        std::chrono::milliseconds default_timeout);

}  // namespace libddp
