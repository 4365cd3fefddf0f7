#include "libddp/ddp/replica.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/ddp/model_check.h"

namespace libddp {
namespace {

std::string describe_options(const DistributedDataParallelOptions& options) {
  return fmt::format(
      "cap_bytes={} first_bytes={} find_unused_parameters={} static_graph={} broadcast_buffers={}",
      options.cap_bytes, options.first_bytes, options.find_unused_parameters, options.static_graph,
      options.broadcast_buffers);
}

std::vector<at::Tensor> values_of(const NamedTensors& parameters, const NamedTensors& buffers) {
  std::vector<at::Tensor> values;
  for (const NamedTensor& parameter : parameters) values.push_back(parameter.tensor);
  for (const NamedTensor& buffer : buffers) values.push_back(buffer.tensor);
  return values;
}

}  // namespace

Replica::Replica(NamedTensors parameters, const NamedTensors& buffers, Group group,
                 const DistributedDataParallelOptions& options, Rethrow rethrow)
    : parameters_(std::move(parameters)), group_(std::move(group)), broadcaster_(group_) {
  check_parameters();
  check_sparse_names(options.sparse_parameters);
  NamedTensors trained;
  for (const NamedTensor& parameter : parameters_) {
    requires_grad_.push_back(parameter.tensor.requires_grad());
    if (requires_grad_.back()) trained.push_back(parameter);
  }
  if (options.init_sync) {
    check_model(*group_, describe_model(parameters_, buffers, describe_options(options),
                                        options.sparse_parameters));
    broadcaster_.broadcast(values_of(parameters_, buffers), 0, "parameters and buffers");
  }
  // The check comes first: a rank without gradients must tell the others that it is the odd one.
  if (trained.empty()) {
    throw ArgumentError(
        "DistributedDataParallel is not needed when a module doesn't have any parameter that "
        "requires a gradient.");
  }
  ReducerOptions reducer;
  reducer.limits.cap_bytes = options.cap_bytes;
  reducer.limits.first_bytes = options.first_bytes;
  reducer.find_unused_parameters = options.find_unused_parameters;
  reducer.static_graph = options.static_graph;
  reducer.sparse_parameters = options.sparse_parameters;
  reducer.rethrow = std::move(rethrow);
  reducer_ = Reducer::create(std::move(trained), group_, std::move(reducer));
}

void Replica::broadcast(const std::vector<at::Tensor>& tensors, int root) {
  broadcaster_.broadcast(tensors, root, "buffers");
}

bool Replica::after_forward(const std::vector<at::Tensor>& outputs, bool sync) {
  if (!sync || !c10::GradMode::is_enabled()) return false;
  check_requires_grad();
  reducer_->arm(outputs);
  return true;
}

void Replica::check_parameters() const {
  for (const auto& [name, tensor] : parameters_) {
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) {
      throw ArgumentError(fmt::format(
          "libddp: parameter '{}' is on {}: libddp does not support anything but dense CPU "
          "parameters yet. Hint: move the model to the CPU before wrapping it.",
          name, tensor.device().str()));
    }
    if (!tensor.is_leaf()) {
      throw ArgumentError(fmt::format(
          "libddp: parameter '{}' is the result of an operation, not a leaf. Hint: wrap a module "
          "whose parameters are torch.nn.Parameter.",
          name));
    }
  }
}

void Replica::check_sparse_names(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    const auto has_name = [&](const NamedTensor& parameter) { return parameter.name == name; };
    if (std::any_of(parameters_.begin(), parameters_.end(), has_name)) continue;
    throw ArgumentError(fmt::format(
        "libddp: sparse_parameters has '{}', which is no parameter of the model. Hint: pass names "
        "as named_parameters() lists them.",
        name));
  }
}

void Replica::check_requires_grad() const {
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (parameters_[index].tensor.requires_grad() == requires_grad_[index]) continue;
    throw ArgumentError(fmt::format(
        "libddp: parameter '{}' had requires_grad={} when it was wrapped and has requires_grad={} "
        "now. Hint: freeze or unfreeze parameters first, then wrap the model again.",
        parameters_[index].name, requires_grad_[index], !requires_grad_[index]));
  }
}

}  // namespace libddp
