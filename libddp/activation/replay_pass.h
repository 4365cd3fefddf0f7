#pragma once

// The tensors of one replay, by slot. See frame.h.
// Thread rule: as Frame.
//
//   at::Tensor kept = pass.pack(tensor);         // into the next slot
//   if (pass.is_stopped()) end the block here;   // it was the last one needed
//   at::Tensor tensor = pass.take(slot, name);   // once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <functional>
#include <string>
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
  bool is_stopped() const { return is_stopped_; }
  /// Tensors seen so far.
  std::size_t num_packed() const { return num_packed_; }
  bool is_complete() const { return limits_.is_complete; }
  bool is_used_up() const { return num_kept_ == 0; }
  std::size_t num_slots() const { return limits_.num_slots; }

  /// Keeps the tensor in the next slot if it is wanted. Returns what the replay's own graph may
  /// save: the same data without history, so that no circle of references arises.
  at::Tensor pack(const at::Tensor& tensor);

  /// What the slot holds; undefined if nothing.
  const at::Tensor& peek(std::size_t slot) const { return tensors_[slot]; }
  at::Tensor take(std::size_t slot, const std::function<std::string()>& name);
  void drop(std::size_t slot);

 private:
  int task_;
  Limits limits_;
  std::function<bool(std::size_t)> is_wanted_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::int64_t> versions_;
  std::size_t num_packed_ = 0;
  std::size_t num_kept_ = 0;
  bool is_stopped_ = false;
};

}  // namespace libddp
