#include "libddp/activation/slot_scope.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <utility>
#include <vector>

#include "libddp/autograd/node_pointer.h"

namespace libddp {
namespace {

using torch::autograd::Engine;
using Hooks = std::unique_ptr<torch::autograd::SavedVariableHooks>;

thread_local const SlotScope* innermost_scope = nullptr;

/// What the graph of a forward pass keeps in a saved tensor's stead.
class DroppedSlot : public torch::autograd::SavedVariableHooks {
 public:
  explicit DroppedSlot(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  ~DroppedSlot() override {
    if (is_packed_) frame_->release(slot_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = frame_->pack(tensor);
    is_packed_ = true;
  }

  at::Tensor call_unpack_hook() override { return frame_->unpack(slot_); }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    if (!frame_->caller().python_slot) return SavedVariableHooks::retrieve_unpack_hook_data();
    return frame_->caller().python_slot(frame_, slot_);
  }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  std::uint32_t slot_ = 0;
  bool is_packed_ = false;
};

/// What a replay's own graph keeps: the tensor.
class ReplayedSlot : public torch::autograd::SavedVariableHooks {
 public:
  explicit ReplayedSlot(const SlotScope& scope) : frame_(scope.frame()), pass_(scope.pass()) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = frame_->pack_replay(*pass_, tensor);
    frame_.reset();
    pass_.reset();
  }

  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
  std::shared_ptr<ReplayPass> pass_;
  at::Tensor tensor_;
};

/// torch's engine, but for the hooks of saved tensors.
class SlotEngine final : public Engine {
  using GraphTask = torch::autograd::GraphTask;
  using variable_list = torch::autograd::variable_list;
  using edge_list = torch::autograd::edge_list;

 public:
  explicit SlotEngine(Engine& torchs) : torchs_(torchs) {}

  Engine& torchs() { return torchs_; }

  Hooks get_default_saved_variable_hooks() override {
    const SlotScope& scope = *innermost_scope;
    const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
    const bool is_off = state.is_tracing || state.disabled_error_message.has_value();
    if (is_off || state.stack.size() > scope.num_below()) {
      return torchs_.get_default_saved_variable_hooks();
    }
    if (scope.pass()) return std::make_unique<ReplayedSlot>(scope);
    return std::make_unique<DroppedSlot>(scope.frame());
  }

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad,
                        const edge_list& outputs) override {
    return torchs_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<GraphTask>& task, NodePointer root,
      torch::autograd::InputBuffer&& buffer) override {
    return torchs_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return torchs_.make_anomaly_metadata();
  }
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks()
      override {
    return torchs_.get_node_creation_hooks();
  }
#endif

 private:
  Engine& torchs_;
};

/// Never destroyed: graphs may outlive everything.
SlotEngine* slot_engine = nullptr;

Engine& engine_of_this_thread() {
  if (innermost_scope != nullptr) return *slot_engine;
  return slot_engine->torchs();
}

/// Before it nothing is changed, so a process that checkpoints nothing runs on torch's engine
/// alone.
void install_engine() {
  static const bool is_installed = [] {
    slot_engine = new SlotEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub(&engine_of_this_thread);
    return true;
  }();
  (void)is_installed;
}

}  // namespace

SlotScope::SlotScope(std::shared_ptr<CheckpointFrame> frame, std::shared_ptr<ReplayPass> pass)
    : frame_(std::move(frame)), pass_(std::move(pass)), outer_(innermost_scope) {
  const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
  TORCH_CHECK(!state.disabled_error_message, *state.disabled_error_message);
  num_below_ = state.stack.size();
  install_engine();
  innermost_scope = this;
}

SlotScope::~SlotScope() { innermost_scope = outer_; }

const SlotScope* SlotScope::innermost() { return innermost_scope; }

}  // namespace libddp
