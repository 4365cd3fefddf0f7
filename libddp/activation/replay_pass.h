#pragma once

// The tensors of one replay, by slot. See checkpoint_frame.h.
// Thread rule: under the frame's lock, so nothing here runs code of others or lets go of a tensor.
//
//   pass.pack(tensor);                           // into the next slot
//   if (pass.is_stopped()) end the block here;   // it was the last one needed
//   auto [tensor, version] = pass.take(slot);    // once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace libddp {

/// What two runs of a block must agree on, for each tensor.
struct TensorKind {
  c10::DimVector sizes;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::kCPU;

  static TensorKind of(const at::Tensor& tensor);
  std::string text() const;
  bool operator==(const TensorKind& other) const = default;
};

class ReplayPass {
 public:
  struct Limits {
    /// Slots of the forward pass so far.
    std::size_t num_slots;
    bool stop_early;
    /// More tensors than slots are an error, not the rest of a forward pass that still runs.
    bool is_complete;
  };

  ReplayPass(int task, Limits limits, std::function<bool(std::size_t)> is_wanted);

  int task() const { return task_; }
  /// Whether another thread runs the block at present.
  bool is_run_by_another() const { return is_running_ && runner_ != std::this_thread::get_id(); }
  bool is_running() const { return is_running_; }
  void end_run() { is_running_ = false; }
  bool is_stopped() const { return is_stopped_; }
  /// Tensors seen so far.
  std::size_t num_packed() const { return num_packed_; }
  bool is_complete() const { return limits_.is_complete; }
  bool is_used_up() const { return num_kept_ == 0; }
  std::size_t num_slots() const { return limits_.num_slots; }

  /// Keeps the tensor in the next slot if it is wanted. REQUIRES: it has no history, else a circle
  /// of references would arise.
  void pack(const at::Tensor& tensor);

  /// What the slot holds; undefined if nothing.
  const at::Tensor& peek(std::size_t slot) const { return tensors_[slot]; }

  struct Taken {
    at::Tensor tensor;
    std::int64_t version = 0;
  };
  /// The slot's tensor and the version it had when it was saved; undefined if there is none.
  Taken take(std::size_t slot);

 private:
  int task_;
  Limits limits_;
  std::function<bool(std::size_t)> is_wanted_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::int64_t> versions_;
  std::size_t num_packed_ = 0;
  std::size_t num_kept_ = 0;
  std::thread::id runner_ = std::this_thread::get_id();
  bool is_running_ = true;
  bool is_stopped_ = false;
};

}  // namespace libddp
