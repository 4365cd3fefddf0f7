#include "libddp/ddp/replicated_model.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "libddp/autograd/after_backward.h"
#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/base/group_identity.h"
#include "libddp/base/monotonic_clock.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/delayed_gradients.h"
#include "libddp/ddp/low_precision.h"
#include "libddp/ddp/reducer.h"
#include "libddp/group/required_group.h"
#include "libddp/module/model_check.h"

namespace libddp {
namespace {

std::string name_of(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "none";
}

std::string describe_options(const DistributedDataParallelOptions& options) {
  const MixedPrecision& precision = options.mixed_precision;
  return fmt::format(
      "cap_bytes={} first_bytes={} hook_first_bytes={} each_bytes=[{}] find_unused_parameters={} "
      "static_graph={} "
      "skip_unused_buckets={} broadcast_buffers={} param_dtype={} reduce_dtype={} buffer_dtype={}",
      options.cap_bytes, options.first_bytes, options.hook_first_bytes,
      fmt::join(options.each_bytes, ", "), options.find_unused_parameters, options.static_graph,
      options.skip_unused_buckets, options.broadcast_buffers, name_of(precision.param_dtype),
      name_of(precision.reduce_dtype), name_of(precision.buffer_dtype));
}

NamedTensors with(NamedTensors first, const NamedTensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Autograd drops it where the pass fails. A pass around that one may go on.
class RaiseAtEnd {
 public:
  explicit RaiseAtEnd(std::shared_ptr<LowPrecisionParameters> low) : low_(std::move(low)) {}
  RaiseAtEnd(const RaiseAtEnd&) = delete;
  RaiseAtEnd& operator=(const RaiseAtEnd&) = delete;
  ~RaiseAtEnd() {
    if (low_ && !is_nested_backward()) low_->raise();
  }
  void raise() { std::exchange(low_, nullptr)->raise(); }

 private:
  std::shared_ptr<LowPrecisionParameters> low_;
};

/// Parameters that require gradients while it lives.
class Thawed {
 public:
  explicit Thawed(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const at::Tensor& parameter : parameters_) parameter.set_requires_grad(true);
  }
  Thawed(const Thawed&) = delete;
  Thawed& operator=(const Thawed&) = delete;
  ~Thawed() {
    for (const at::Tensor& parameter : parameters_) parameter.set_requires_grad(false);
  }

 private:
  const std::vector<at::Tensor> parameters_;
};

std::vector<at::Tensor> values_of(const NamedTensors& parameters, const NamedTensors& buffers) {
  std::vector<at::Tensor> values;
  for (const NamedTensor& parameter : parameters) values.push_back(parameter.tensor);
  for (const NamedTensor& buffer : buffers) values.push_back(buffer.tensor);
  return values;
}

}  // namespace

ReplicatedModel::ReplicatedModel(NamedTensors parameters, const NamedTensors& buffers, Group group,
                                 const DistributedDataParallelOptions& options, Rethrow rethrow,
                                 DelayedParameters delayed)
    : parameters_(std::move(parameters)),
      rethrow_(std::move(rethrow)),
      delayed_parameters_(std::move(delayed)),
      group_(required_group(std::move(group), "DistributedDataParallel")),
      broadcaster_(group_) {
  join(buffers, options);
}

void ReplicatedModel::join(const NamedTensors& buffers,
                           const DistributedDataParallelOptions& options) {
  is_member_ = std::make_shared<bool>(true);
  wrapped_.clear();
  const NamedTensors all = with(parameters_, delayed_parameters_.parameters);
  const NamedTensors synced = options.init_sync_buffers ? buffers : NamedTensors{};
  for (const auto& [name, tensor] : parameters_) {
    wrapped_.push_back({tensor.requires_grad(), tensor.sizes().vec(), tensor.scalar_type()});
  }
  // Before the checks of this rank alone: an odd rank must tell the others that it is the odd one.
  if (options.init_sync) {
    check_model(*group_, "DistributedDataParallel",
                describe_model(all, synced, describe_options(options), options.sparse_parameters));
  }
  check_parameters(all);
  check_sparse_names(options.sparse_parameters);
  if (options.init_sync) {
    // With staging memory of its own, which goes at once: the one for buffers is smaller and stays.
    TensorBroadcaster(group_).broadcast(values_of(all, synced), 0, "parameters and buffers");
  }
  if (delayed_parameters_.parameters.empty() && !trains_anything()) {
    throw ArgumentError(
        "DistributedDataParallel is not needed when a module doesn't have any parameter that "
        "requires a gradient.");
  }
  const MixedPrecision& precision = options.mixed_precision;
  if (precision.param_dtype) {
    low_ = std::make_shared<LowPrecisionParameters>(all, *precision.param_dtype);
  }
  if (!delayed_parameters_.parameters.empty()) {
    DelayedParameters delayed = delayed_parameters_;
    delayed.gradient_as_bucket_view = options.gradient_as_bucket_view.value_or(true);
    delayed_ = DelayedGradients::create(std::move(delayed), group_, rethrow_);
  }
  make_reducer(options);
  apply(precision, buffers);
}

void ReplicatedModel::rejoin(Group group, const NamedTensors& buffers,
                             const DistributedDataParallelOptions& options) {
  required_group(group, "DistributedDataParallel::rejoin");
  const auto hook = reducer_ ? reducer_->comm_hook() : hook_;
  leave();
  hook_ = hook;
  restore_dtypes(buffers);
  group_ = std::move(group);
  broadcaster_ = TensorBroadcaster(group_);
  {
    const Thawed thawed(frozen_since());
    join(buffers, options);
  }
  // Mixed precision has made its own anew.
  if (hook_ && !reducer_->comm_hook()) reducer_->register_comm_hook(over_group(hook_, group_));
  if (has_declared_static_graph_ && !options.static_graph) reducer_->set_static_graph();
  reducer_->set_manual_finalization(finalizes_manually_);
}

// Nothing that a pass which broke off has left refers to what comes: hooks go with the Reducer, and
// graphs of before find it gone.
void ReplicatedModel::leave() {
  *is_member_ = false;
  if (low_) low_->raise();
  const bool shares_values = reducer_ && reducer_->is_sharded();
  lowered_here_ = false;
  output_leaves_ = nullptr;
  delayed_ = nullptr;
  reducer_ = nullptr;
  low_ = nullptr;
  for (const auto& [name, tensor] : with(parameters_, delayed_parameters_.parameters)) {
    tensor.mutable_grad() = at::Tensor();
    // What an optimizer has shown there is memory of the group.
    if (shares_values) tensor.set_data(tensor.detach().clone());
  }
}

// As the others describe theirs, who have not converted them yet.
void ReplicatedModel::restore_dtypes(const NamedTensors& buffers) {
  for (const auto& [name, buffer] : buffers) {
    const auto before = buffer_dtypes_.find(name);
    if (before != buffer_dtypes_.end()) buffer.set_data(buffer.to(before->second));
  }
  buffer_dtypes_.clear();
}

std::vector<at::Tensor> ReplicatedModel::frozen_since() const {
  std::vector<at::Tensor> frozen;
  for (std::size_t index = 0; index < wrapped_.size(); ++index) {
    const at::Tensor& parameter = parameters_[index].tensor;
    if (wrapped_[index].requires_grad && !parameter.requires_grad()) frozen.push_back(parameter);
  }
  return frozen;
}

Reducer& ReplicatedModel::reducer() const {
  if (reducer_) return *reducer_;
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  throw StateError(fmt::format(
      "{}: the model has left its process group and could not join this one: its last rejoin() "
      "failed. Hint: call it again, on all ranks.",
      me.where()));
}

bool ReplicatedModel::trains_anything() const {
  return std::any_of(wrapped_.begin(), wrapped_.end(),
                     [](const Wrapped& wrapped) { return wrapped.requires_grad; });
}

void ReplicatedModel::make_reducer(const DistributedDataParallelOptions& options) {
  ReducerOptions reducer;
  reducer.limits.cap_bytes = options.cap_bytes;
  reducer.limits.first_bytes = options.first_bytes;
  reducer.limits.hook_first_bytes = options.hook_first_bytes;
  reducer.limits.each_bytes = options.each_bytes;
  reducer.find_unused_parameters = options.find_unused_parameters;
  reducer.static_graph = options.static_graph;
  reducer.sparse_parameters = options.sparse_parameters;
  reducer.skip_unused_buckets = options.skip_unused_buckets;
  reducer.gradient_as_bucket_view = options.gradient_as_bucket_view;
  reducer.rethrow = rethrow_;
  if (low_) reducer.after_pass = [low = low_] { low->raise(); };
  NamedTensors trained;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (wrapped_[index].requires_grad) trained.push_back(parameters_[index]);
  }
  reducer_ = Reducer::create(std::move(trained), group_, std::move(reducer));
}

void ReplicatedModel::apply(const MixedPrecision& precision, const NamedTensors& buffers) {
  if (precision.buffer_dtype) {
    for (const auto& [name, buffer] : buffers) {
      if (!buffer.is_floating_point()) continue;
      buffer_dtypes_[name] = buffer.scalar_type();
      buffer.set_data(buffer.to(*precision.buffer_dtype));
    }
  }
  const auto reduce_dtype = precision.reduce_dtype ? precision.reduce_dtype : precision.param_dtype;
  if (reduce_dtype && reduce_dtype != at::kFloat) {
    reducer_->register_comm_hook(compress_hook(group_, *reduce_dtype));
  }
  if (!low_) return;
  // Parameters that change their dtype lose the hooks of others.
  reducer_->claim_parameters();
  reducer_->accept_gradients_of(low_->dtype());
  if (delayed_) delayed_->accept_gradients_of(low_->dtype());
  low_->on_change([reducer = std::weak_ptr(reducer_), delayed = std::weak_ptr(delayed_)] {
    if (const auto alive = reducer.lock()) alive->renew_hooks();
    if (const auto alive = delayed.lock()) alive->renew_hooks();
  });
}

void ReplicatedModel::broadcast(const std::vector<at::Tensor>& tensors, int root) {
  const std::int64_t begin = monotonic_ns();
  broadcaster_.broadcast(tensors, root, "buffers");
  reducer().add_exposed(monotonic_ns() - begin);
}

void ReplicatedModel::before_forward() {
  if (low_ || c10::GradMode::is_enabled()) reducer().check_users();
  if (c10::GradMode::is_enabled()) {
    group_->retract_error();
    follow_dtypes();
  }
  reducer().prepare_for_forward();
  if (low_) lowered_here_ = low_->lower();
}

// Autograd has dropped the hooks of parameters that have another dtype now, or had one meanwhile.
void ReplicatedModel::follow_dtypes() {
  if (low_ && low_->is_low()) return;
  reducer().renew_hooks();
  if (delayed_) delayed_->renew_hooks();
  bool is_other = false;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const at::ScalarType dtype = parameters_[index].tensor.scalar_type();
    if (dtype == wrapped_[index].dtype) continue;
    if (low_) {
      refuse_change(index, fmt::format("dtype {}", c10::toString(wrapped_[index].dtype)),
                    fmt::format("dtype {}", c10::toString(dtype)),
                    "mixed_precision keeps memory of the first one; convert the model first");
    }
    wrapped_[index].dtype = dtype;
    is_other |= wrapped_[index].requires_grad;
  }
  if (is_other) reducer().follow_dtypes();
}

void ReplicatedModel::forward_failed(const std::string& what, bool sync) {
  raise_low();
  if (sync && c10::GradMode::is_enabled()) group_->report_error("in forward: " + what);
}

void ReplicatedModel::raise_low() {
  if (low_ && lowered_here_) low_->raise();
}

bool ReplicatedModel::after_forward(const std::vector<at::Tensor>& outputs, bool sync) {
  if (!c10::GradMode::is_enabled()) {
    raise_low();  // nothing refers to the low precision
    return false;
  }
  if (delayed_) delayed_->arm(sync);
  if (!sync) {
    reducer().prepare_for_local_backward(outputs);
    raise_after_backward(outputs);
    return false;
  }
  bool trains = false;
  try {
    trains = check_unchanged();
    if (trains) reducer().prepare_for_backward(outputs);
  } catch (...) {
    // Errors that all ranks have do no harm here, see NOTE [Reported errors].
    group_->report_error("in forward: " + first_line_of(std::current_exception()));
    throw;
  }
  if (!trains) raise_after_backward(outputs);
  return true;
}

// Of a pass that the Reducer does not watch. Where the outputs are unknown, the parameters stay low
// until the next pass that synchronises.
void ReplicatedModel::raise_after_backward(const std::vector<at::Tensor>& outputs) {
  if (!low_) return;
  const auto has_graph = [](const at::Tensor& output) { return output.requires_grad(); };
  if (!outputs.empty() && std::none_of(outputs.begin(), outputs.end(), has_graph)) {
    return raise_low();
  }
  output_leaves_ = nullptr;  // its hooks go: a leaf that is handed through again gets new ones
  output_leaves_ = call_before_backward(outputs, [low = low_] {
    call_after_backward([end = std::make_shared<RaiseAtEnd>(low)] { end->raise(); });
  });
}

void ReplicatedModel::shard(bool averages) {
  if (low_ || delayed_) {
    throw ArgumentError(fmt::format(
        "libddp: an optimizer cannot be sharded over a model with {}. Hint: leave out shard_over.",
        low_ ? "mixed_precision" : "delay_all_reduce_named_params"));
  }
  reducer().shard(averages);
}

void ReplicatedModel::check_parameters(const NamedTensors& parameters) {
  for (const auto& [name, tensor] : parameters) {
    if (tensor.is_meta()) {
      throw ArgumentError(fmt::format(
          "libddp: parameter '{}' is on meta, without data. Hint: move the model to a device by "
          "module.to_empty(), and initialise or load it, before wrapping it.",
          name));
    }
    if (tensor.layout() != at::kStrided) {
      throw ArgumentError(fmt::format(
          "libddp: parameter '{}' is on {} in layout {}, and only dense ones can be trained. Hint: "
          "sparse gradients of dense parameters are welcome.",
          name, tensor.device().str(), c10::str(tensor.layout())));
    }
    if (tensor.device() != parameters.front().tensor.device()) {
      throw ArgumentError(fmt::format(
          "libddp: parameter '{}' is on {} and '{}' on {}: one process trains on one device. Hint: "
          "move the whole model with module.to(device) before wrapping it.",
          name, tensor.device().str(), parameters.front().name,
          parameters.front().tensor.device().str()));
    }
    if (!tensor.is_leaf()) {
      throw ArgumentError(fmt::format(
          "libddp: parameter '{}' is the result of an operation, not a leaf. Hint: wrap a module "
          "whose parameters are torch.nn.Parameter.",
          name));
    }
  }
}

void ReplicatedModel::check_sparse_names(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    const auto has_name = [&](const NamedTensor& parameter) { return parameter.name == name; };
    if (std::any_of(parameters_.begin(), parameters_.end(), has_name)) continue;
    throw ArgumentError(fmt::format(
        "libddp: sparse_parameters has '{}', which is no parameter of the model. Hint: pass names "
        "as named_parameters() lists them.",
        name));
  }
}

void ReplicatedModel::refuse_change(std::size_t index, const std::string& was,
                                    const std::string& is, const char* hint) const {
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  throw ArgumentError(
      fmt::format("{} forward: parameter '{}' had {} when it was wrapped and has {} now. Hint: {}, "
                  "then wrap the model again.",
                  me.where(), parameters_[index].name, was, is, hint));
}

bool ReplicatedModel::check_unchanged() const {
  bool trains = false;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    const at::Tensor& tensor = parameters_[index].tensor;
    const auto& [requires_grad, sizes, dtype] = wrapped_[index];
    if (!requires_grad) {
      // Its gradients would stay this rank's own, and the ranks' models would drift apart.
      if (tensor.requires_grad()) {
        refuse_change(index, "requires_grad=false", "requires_grad=true",
                      "what is trained when the model is wrapped may be frozen and unfrozen at any "
                      "time; unfreeze this one first");
      }
      continue;
    }
    // One that is frozen now counts as unused.
    trains |= tensor.requires_grad();
    // Autograd has dropped the hook of such a parameter.
    if (!low_ && tensor.scalar_type() != dtype) {
      refuse_change(index, fmt::format("dtype {}", c10::toString(dtype)),
                    fmt::format("dtype {}", c10::toString(tensor.scalar_type())),
                    "convert the model outside of its forward, or first");
    }
    if (tensor.sizes() != at::IntArrayRef(sizes)) {
      refuse_change(index, fmt::format("shape [{}]", fmt::join(sizes, ", ")),
                    fmt::format("shape [{}]", fmt::join(tensor.sizes(), ", ")),
                    "resize parameters first");
    }
  }
  return trains;
}

bool ReplicatedModel::backward_failed(const std::string& what) {
  return reducer_ && reducer_->backward_failed(what);
}

bool ReplicatedModel::wants_outputs(bool sync) const {
  return sync || low_ || reducer().scatters_averages();
}

void ReplicatedModel::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  reducer().register_comm_hook(std::move(hook));
}

void ReplicatedModel::set_static_graph() {
  reducer().set_static_graph();
  has_declared_static_graph_ = true;
}

void ReplicatedModel::set_manual_finalization(bool manual) {
  reducer().set_manual_finalization(manual);
  finalizes_manually_ = manual;
}

void ReplicatedModel::finalize_backward_manual() { reducer().finalize_backward_manual(); }

const NamedTensors& ReplicatedModel::trained_parameters() const { return reducer().parameters(); }

std::shared_ptr<const GradientBuckets> ReplicatedModel::buckets() const {
  return reducer().shared_buckets();
}

const BucketLayout& ReplicatedModel::layout() const { return reducer().layout(); }

const PassTimeline& ReplicatedModel::timeline() const { return reducer().timeline(); }

}  // namespace libddp
