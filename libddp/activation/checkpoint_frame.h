#pragma once

// One run of a checkpointed block. The block runs with autograd's graph as ever, but the tensors
// that the graph saves are dropped: each leaves a slot. The first slot that backward asks for
// replays the block once and fills all of them.
//
// Words: a slot is the place of one saved tensor, numbered in the order of saving; a pass is one
// replay for one backward pass (graph task). Slots are emptied as backward takes them, so several
// backward passes mean several replays.
// Thread rule: any thread. A replay runs in the thread that asks first; others of the same backward
// pass wait for it. The frame's own lock is never held while code of others runs.
//
//   auto frame = std::make_shared<CheckpointFrame>(settings, caller);
//   frame->begin_forward(devices);
//   { const SlotScope scope(frame); run the block; }   // slot = frame->pack(tensor)
//   frame->end_forward();
//   in backward: tensor = frame->unpack(slot);         // calls caller.replay(pass)

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <c10/util/DimVector.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/activation/autocast_state.h"
#include "libddp/activation/random_state.h"
#include "libddp/activation/replay_pass.h"

namespace libddp {

class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  struct Settings {
    /// The replay draws the random numbers that the forward pass drew.
    bool preserve_random = true;
    /// The replay ends with the last tensor that backward needs. Without a value it does where that
    /// can pay: to leave a block in the middle takes an exception through torch, some 40 us, more
    /// than the rest of a block whose saved tensors are all small (kSmallNumel). Sizes decide, not
    /// times, so ranks with equal inputs decide alike.
    std::optional<bool> stop_early;
    /// Shapes, dtypes and devices of the replayed tensors must be those of the forward pass.
    bool check_determinism = true;
  };

  static constexpr std::int64_t kSmallNumel = 4096;

  using Name = std::function<std::string()>;

  /// What the block's caller does. Each may be called in any thread.
  struct Caller {
    /// For messages only.
    Name name;
    /// Runs the block again within a SlotScope of `pass`. Returns when the block has ended or the
    /// pass has stopped it.
    std::function<void(const std::shared_ptr<ReplayPass>& pass)> replay;
    /// Throws something that leaves the block; called in the replay's thread.
    std::function<void()> stop;
    /// Throws the caller's error with this text; else a CheckpointError is thrown.
    std::function<void(const std::string& message)> fail;
    /// Runs `wait` without a lock that the replay needs; if empty, there is none.
    std::function<void(const std::function<void()>& wait)> wait_unlocked;
    /// A slot for compiled autograd: a Python function of one argument, and that argument.
    std::function<std::pair<c10::SafePyObject, c10::SafePyObject>(
        const std::shared_ptr<CheckpointFrame>&, std::uint32_t slot)>
        python_slot;
  };

  CheckpointFrame(Settings settings, Caller caller);

  const Caller& caller() const { return caller_; }

  /// Notes the generators and autocast. `devices` = those of the inputs.
  void begin_forward(const std::vector<c10::Device>& devices);
  /// Forgets the generators' state if the block drew no number.
  void end_forward();

  /// A slot for a tensor that the graph saves.
  std::uint32_t pack(const at::Tensor& tensor);

  /// The same of a replay. Returns what the replay's own graph may save. Throws if the replay may
  /// end here.
  at::Tensor pack_replay(ReplayPass& pass, const at::Tensor& tensor);

  /// The tensor of the slot, from the replay of the present backward pass.
  /// Throws CheckpointError (by Caller::fail): the replay differed from the forward pass; taken
  /// twice.
  at::Tensor unpack(std::uint32_t slot);

  /// The graph has let go of the slot.
  void release(std::uint32_t slot);

 private:
  struct Slot {
    TensorKind kind;
    bool is_alive = true;
  };

  using Passes = std::vector<std::shared_ptr<ReplayPass>>;

  /// The pass of the backward pass `task`, and whether it was made now, to be run.
  std::pair<std::shared_ptr<ReplayPass>, bool> pass_of(int task);
  Passes::iterator find(int task);
  std::shared_ptr<ReplayPass> make_pass(int task);
  void replay(const std::shared_ptr<ReplayPass>& pass);
  void end(const std::shared_ptr<ReplayPass>& pass, bool forget);
  void wait(std::unique_lock<std::mutex>& lock, int task);
  void check(const ReplayPass& pass);
  std::string differences(const ReplayPass& pass) const;
  at::Tensor checked(ReplayPass::Taken taken, std::uint32_t slot) const;
  [[noreturn]] void fail(const std::string& message) const;

  Settings settings_;
  Caller caller_;
  std::unique_ptr<RandomState> random_;
  AutocastState autocast_;
  /// Guards what follows.
  std::mutex mutex_;
  std::condition_variable pass_has_ended_;
  std::vector<Slot> slots_;
  Passes passes_;
  std::int64_t largest_numel_ = 0;
  bool forward_is_done_ = false;
};

}  // namespace libddp
