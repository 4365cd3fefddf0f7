#pragma once

// Within its life, what autograd's graph saves in this thread goes to a CheckpointFrame: in C++,
// without the interpreter and its lock. torch asks its engine for the hooks of each saved tensor;
// while a scope is in force in a thread, that thread is answered by an engine of ours, which passes
// everything else on to torch's. Thread rule: made and destroyed in the same thread, innermost
// first.
//
//   { const SlotScope scope(frame); run the block; }         // forward pass
//   { const SlotScope scope(frame, pass); run it again; }    // replay; Caller::stop ends it early
//
// torch's own hooks (torch.autograd.graph.saved_tensors_hooks) that are entered within go first, as
// they do with torch's checkpoint.

#include <cstddef>
#include <memory>

#include "libddp/activation/checkpoint_frame.h"

namespace libddp {

class SlotScope {
 public:
  /// Throws c10::Error: saved tensor hooks are disabled in this thread.
  explicit SlotScope(std::shared_ptr<CheckpointFrame> frame,
                     std::shared_ptr<ReplayPass> pass = nullptr);
  ~SlotScope();
  SlotScope(const SlotScope&) = delete;
  SlotScope& operator=(const SlotScope&) = delete;

  /// The innermost of this thread, or nullptr.
  static const SlotScope* innermost();

  const std::shared_ptr<CheckpointFrame>& frame() const { return frame_; }
  const std::shared_ptr<ReplayPass>& pass() const { return pass_; }
  /// torch's own hooks below this scope.
  std::size_t num_below() const { return num_below_; }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  /// Null in a forward pass.
  std::shared_ptr<ReplayPass> pass_;
  std::size_t num_below_;
  const SlotScope* outer_;
};

}  // namespace libddp
