#include "libddp/fsdp/wrapped_module.h"

#include <fmt/format.h>

#include <mutex>
#include <unordered_set>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/sharded_model.h"
#include "libddp/module/module_tensors.h"

namespace libddp {
namespace {

struct WrappedModules {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<WrappedModule>> by_module;
};

WrappedModules& wrapped_modules() {
  static WrappedModules* const made = new WrappedModules;  // outlives every module
  return *made;
}

/// Each tensor once, without those of wrapped modules under `module`.
NamedTensors own_parameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> taken;
  for (const auto& child : module.modules(/*include_self=*/false)) {
    const auto wrapped = WrappedModule::find(*child);
    if (!wrapped) continue;
    for (const at::Tensor& tensor : child->parameters()) taken.insert(tensor.unsafeGetTensorImpl());
  }
  NamedTensors own;
  for (NamedTensor& parameter : named_parameters(module)) {
    if (taken.insert(parameter.tensor.unsafeGetTensorImpl()).second) {
      own.push_back(std::move(parameter));
    }
  }
  return own;
}

}  // namespace

std::shared_ptr<WrappedModule> WrappedModule::wrap(const std::shared_ptr<torch::nn::Module>& module,
                                                   const std::string& name,
                                                   const ShardOptions& options) {
  if (find(*module)) {
    throw ArgumentError(fmt::format(
        "libddp fsdp: module '{}' is wrapped already. Hint: wrap each module once.", name));
  }
  const NamedTensors parameters = own_parameters(*module);
  auto wrapped = std::make_shared<WrappedModule>(
      module, std::make_shared<ParamGroup>(name, parameters, options));
  const std::lock_guard lock(wrapped_modules().mutex);
  std::erase_if(wrapped_modules().by_module,
                [](const auto& entry) { return entry.second->module_.expired(); });
  return wrapped_modules().by_module[module.get()] = std::move(wrapped);
}

std::shared_ptr<WrappedModule> WrappedModule::find(const torch::nn::Module& module) {
  const std::lock_guard lock(wrapped_modules().mutex);
  const auto found = wrapped_modules().by_module.find(&module);
  const bool is_there = found != wrapped_modules().by_module.end() &&
                        !found->second->module_.expired();  // another one had this address
  return is_there ? found->second : nullptr;
}

std::shared_ptr<ShardedModel> WrappedModule::join(const torch::nn::Module& root,
                                                  ShardedModelOptions options) {
  std::vector<std::shared_ptr<WrappedModule>> all{find(root)};
  for (const auto& child : root.modules(/*include_self=*/false)) {
    if (auto wrapped = find(*child)) all.push_back(std::move(wrapped));
  }
  std::vector<std::shared_ptr<ParamGroup>> units;
  for (const auto& wrapped : all) units.push_back(wrapped->unit_);
  auto model = ShardedModel::create(std::move(units), std::move(options));
  for (const auto& wrapped : all) wrapped->model_ = model;
  return model;
}

std::unordered_map<const void*, Group> WrappedModule::owners() {
  std::unordered_map<const void*, Group> owners;
  const std::lock_guard lock(wrapped_modules().mutex);
  for (const auto& [module, wrapped] : wrapped_modules().by_module) {
    const ParamGroup& unit = *wrapped->unit_;
    for (const auto& flat : unit.flats()) {
      for (const auto& [name, tensor] : flat->parameters()) {
        owners[tensor.unsafeGetTensorImpl()] = unit.options().shard;
      }
    }
  }
  return owners;
}

void WrappedModule::forget(const torch::nn::Module& root) {
  const auto under = root.modules(/*include_self=*/false);
  std::vector<std::shared_ptr<WrappedModule>> ended;  // their units end outside of the lock
  const std::lock_guard lock(wrapped_modules().mutex);
  const auto erase = [&](const torch::nn::Module* module) {
    auto node = wrapped_modules().by_module.extract(module);
    if (!node.empty()) ended.push_back(std::move(node.mapped()));
  };
  erase(&root);
  for (const auto& child : under) erase(child.get());
}

std::shared_ptr<ShardedModel> WrappedModule::begin() {
  auto model = model_.lock();
  if (!model) {
    throw StateError(fmt::format(
        "libddp fsdp: module '{}' is sharded, but the model around it is not wrapped. Hint: create "
        "FullyShardedDataParallel of the whole model after the last fully_shard.",
        unit_->name()));
  }
  try {
    model->before_forward(*unit_);
  } catch (...) {
    if (model->is_root(*unit_)) {
      model->report_error("in forward: " + first_line_of(std::current_exception()));
    }
    throw;
  }
  return model;
}

void WrappedModule::end(ShardedModel& model, const std::vector<at::Tensor>& outputs) {
  model.after_forward(*unit_, outputs);
}

void WrappedModule::fail(ShardedModel& model, const std::exception_ptr& error) {
  model.forward_failed(*unit_, first_line_of(error));
}

const std::optional<at::ScalarType>& WrappedModule::input_dtype() const {
  return unit_->options().param_dtype;
}

}  // namespace libddp
