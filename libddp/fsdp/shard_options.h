#pragma once

// How a unit is sharded: over which ranks, in which precisions.
// Thread rule: plain data.
//
//   ShardOptions options{.shard = group};                                // FULL_SHARD
//   ShardOptions hybrid{.shard = host_group, .replicate = across_hosts};  // HYBRID_SHARD
//   ShardOptions offloaded{.shard = group, .compute_device = device};     // CPU offload

#include <ATen/core/Tensor.h>

#include <optional>
#include <set>
#include <string>

#include "libddp/group/process_group.h"

namespace libddp {

struct ShardOptions {
  /// Ranks that own a block each; null: every rank owns everything (NO_SHARD, with `replicate`).
  Group shard = nullptr;
  /// Ranks that own the same block: their gradients are averaged too. Null: none. With neither,
  /// nothing is averaged.
  Group replicate = nullptr;
  /// Gathered parameters stay from forward to backward (SHARD_GRAD_OP): faster, more memory.
  /// Without effect where nothing is gathered.
  bool keep_unsharded = false;
  /// Parameters are gathered, and computed with, in this dtype; nullopt = their own.
  std::optional<at::ScalarType> param_dtype{};
  /// Names of parameters that keep their own dtype in spite of param_dtype; alike on all ranks.
  std::set<std::string> keep_dtype{};
  /// Gradients travel in this dtype; nullopt = param_dtype, else that of the parameters.
  std::optional<at::ScalarType> reduce_dtype{};
  /// As in torch's fully_shard from 2.15 on: without reduce_dtype gradients travel in the
  /// parameters' own dtype, and those that autograd has computed in a higher precision than
  /// param_dtype are not rounded to that.
  bool wide_gradients = false;
  /// Averaged gradients stay in param_dtype; otherwise they get the parameters' dtype.
  bool keep_low_gradients = false;
  /// A device that the parameters are computed with on, while shards and their gradients are in the
  /// host's memory: see NOTE [Offloading]. The parameters may be there or on the device before.
  /// Nullopt, or the CPU: everything is where the parameters are.
  std::optional<c10::Device> compute_device{};
  /// That memory is page-locked: only then copies run beside the computation.
  bool pin_memory = true;
};

}  // namespace libddp
