#pragma once

// Selective checkpointing by operator: the results of chosen operators (matrix products, say) are
// kept in the forward pass and handed out in the replay, so that only the cheap ones run again.
//
// NOTE [Kept results that are written to]
// torch.nn.functional.linear and the cells of recurrent networks change in place what a matrix
// product has given, through a view with a version counter of its own (_unsafe_view, unsafe_chunk),
// so that the version of what is kept does not tell. Before that, what is kept becomes a copy. What
// shares the counter is told when it is handed out, as torch does it.
//
// Thread rule: as CheckpointFrame.
//
//   auto store = std::make_shared<SelectiveStore>(operators, /*allow_mutation=*/false);
//   SavingRun saving(store);     saving.enter();    block();  saving.leave();     // forward pass
//   ReplayRun replay(store);     replay.enter();    block();  replay.leave();     // each replay

#include <ATen/core/ivalue.h>

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "libddp/activation/op_interceptor.h"
#include "libddp/activation/random_state.h"

namespace libddp {

using OperatorSet = std::unordered_set<c10::OperatorHandle>;

/// By (name, overload), such as ("aten::mm", "").
/// Interceptors see them from now on.
/// Throws ArgumentError: there is no such operator, or it changes its arguments or returns a view.
/// REQUIRES: OpInterceptor::is_available().
OperatorSet operators_named(const std::vector<std::pair<std::string, std::string>>& names);

class SelectiveStore {
 public:
  SelectiveStore(std::shared_ptr<const OperatorSet> operators, bool allow_mutation)
      : operators_(std::move(operators)), allow_mutation_(allow_mutation) {
    entries_.reserve(8);
  }

  bool keeps(const c10::OperatorHandle& op) const { return operators_->contains(op); }

  /// Keeps what `op` has put on the stack.
  void save(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// Puts what `op` gave the `index`-th time on the stack, in its arguments' stead.
  /// Throws CheckpointError: the forward pass ran another operator there, or the result was
  /// changed.
  void hand_out(std::size_t index, const c10::OperatorHandle& op, torch::jit::Stack& stack) const;

  /// Before an operator writes to `target`: see NOTE [Kept results that are written to].
  void protect_from(const at::Tensor& target);

 private:
  struct Result {
    c10::IValue value;
    std::int64_t version;
  };
  struct Entry {
    c10::OperatorHandle op;
    c10::SmallVector<Result, 1> results;
    /// After an operator that draws numbers: what follows goes on from there.
    std::unique_ptr<RandomState> random;
  };

  static void note_random(Entry& entry);
  void protect_from(const at::Tensor& target, Result& result) const;

  std::shared_ptr<const OperatorSet> operators_;
  bool allow_mutation_;
  std::vector<Entry> entries_;
};

class SavingRun : public OpInterceptor {
 public:
  explicit SavingRun(std::shared_ptr<SelectiveStore> store) : store_(std::move(store)) {}

 protected:
  void on_op(const Op& op, torch::jit::Stack* stack) override;

 private:
  std::shared_ptr<SelectiveStore> store_;
};

class ReplayRun : public OpInterceptor {
 public:
  explicit ReplayRun(std::shared_ptr<SelectiveStore> store) : store_(std::move(store)) {}

  /// The next replay begins.
  void rewind() { next_ = 0; }

 protected:
  void on_op(const Op& op, torch::jit::Stack* stack) override;

 private:
  std::shared_ptr<SelectiveStore> store_;
  std::size_t next_ = 0;
};

}  // namespace libddp
