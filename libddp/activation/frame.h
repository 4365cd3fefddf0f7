#pragma once

// One run of a checkpointed block. The block runs with autograd's graph as ever, but the tensors
// that the graph saves are dropped: each leaves a slot. The first slot that backward asks for
// replays the block once and fills all of them.
//
// Words: a slot is the place of one saved tensor, numbered in the order of saving; a pass is one
// replay for one backward pass (graph task). Slots are emptied as backward takes them, so several
// backward passes mean several replays.
// Thread rule: under one lock of the caller's (the interpreter's), also while the replay runs.
//
//   auto frame = std::make_shared<Frame>(settings, name, replay);
//   frame->begin_forward(devices);
//   run with saved tensor hooks: slot = frame->pack(tensor);
//   frame->end_forward();
//   in backward: tensor = frame->unpack(slot);   // calls replay(pass), which calls pass.pack

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/activation/autocast_state.h"
#include "libddp/activation/random_state.h"
#include "libddp/activation/replay_pass.h"

namespace libddp {

class Frame : public std::enable_shared_from_this<Frame> {
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
  /// Runs the block again with each tensor that is saved given to `pass`. Returns when the block
  /// has ended or `pass` has stopped it.
  using Replay = std::function<void(const std::shared_ptr<ReplayPass>& pass)>;

  /// `name` is called for messages only.
  Frame(Settings settings, Name name, Replay replay);

  /// Called with the message of an error of the determinism check; may throw another one.
  void on_difference(std::function<void(const std::string& message)> function) {
    on_difference_ = std::move(function);
  }

  /// Notes the generators and autocast. `devices` = those of the inputs.
  void begin_forward(const std::vector<c10::Device>& devices);
  /// Forgets the generators' state if the block drew no number.
  void end_forward();

  /// A slot for a tensor that the graph saves.
  std::uint32_t pack(const at::Tensor& tensor);

  /// The tensor of the slot, from the replay of the present backward pass.
  /// Throws CheckpointError: the replay differed from the forward pass; taken twice.
  at::Tensor unpack(std::uint32_t slot);

  /// The graph has let go of the slot.
  void release(std::uint32_t slot);

 private:
  struct Slot {
    TensorKind kind;
    bool is_alive = true;
  };

  ReplayPass* pass_of(int task);
  std::shared_ptr<ReplayPass> replay(int task);
  void run_replay(const std::shared_ptr<ReplayPass>& pass);
  void check(const ReplayPass& pass) const;
  [[noreturn]] void fail(const std::string& message) const;

  Settings settings_;
  Name name_;
  Replay replay_;
  std::function<void(const std::string& message)> on_difference_;
  std::unique_ptr<RandomState> random_;
  AutocastState autocast_;
  std::vector<Slot> slots_;
  std::vector<std::shared_ptr<ReplayPass>> passes_;
  std::int64_t largest_numel_ = 0;
  bool forward_is_done_ = false;
};

}  // namespace libddp
