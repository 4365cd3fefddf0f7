#pragma once

// A collective made of blocks that travel point to point: gather, scatter, uneven all_gather,
// all_to_all. Blocks of the other ranks go through Backend::exchange; the own block is copied.
//
// Thread rule: one thread.
//
//   BlockExchange blocks(identity);
//   blocks.send(root, input);
//   blocks.receive(rank, operand);     // for each block that comes here
//   return blocks.launch(backend, std::move(call));

#include <ATen/core/Tensor.h>

#include <vector>

#include "libddp/base/group_identity.h"
#include "libddp/group/backend.h"
#include "libddp/group/operand.h"

namespace libddp {

class BlockExchange {
 public:
  /// `group` outlives it.
  explicit BlockExchange(const GroupIdentity& group) : group_(group) {}

  void send(int rank, const at::Tensor& wire);
  void receive(int rank, const Operand& operand);
  /// A tensor that was not contiguous and of which several blocks are parts.
  void also_copy_back(const Operand& operand) { targets_.push_back(operand); }

  /// The own copy is made with the others' blocks, so that a failed call changes as little as can
  /// be and an asynchronous one reads its input when it runs. Once.
  WorkPtr launch(Backend& backend, BackendCall&& call);
  /// The same for blocks of one size that lie one after another, on all ranks.
  WorkPtr launch_even(Backend& backend, BackendCall&& call, const at::Tensor& output,
                      const at::Tensor& input);

 private:
  const GroupIdentity& group_;
  std::vector<Exchange> parts_;
  std::vector<Operand> targets_;
  at::Tensor own_input_;
  at::Tensor own_output_;
};

}  // namespace libddp
