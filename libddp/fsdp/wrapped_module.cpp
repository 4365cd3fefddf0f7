#include "libddp/fsdp/wrapped_module.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
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

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
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

WrappedModule::WrappedModule(const std::shared_ptr<torch::nn::Module>& module, std::string name,
                             NamedTensors parameters, const ShardOptions& options)
    : module_(module),
      name_(std::move(name)),
      parameters_(std::move(parameters)),
      number_(next_number()) {
  make_unit(options);
}

void WrappedModule::make_unit(const ShardOptions& options) {
  options_ = options;
  unit_ = std::make_shared<ParamGroup>(name_, parameters_, options);
}

std::shared_ptr<WrappedModule> WrappedModule::wrap(const std::shared_ptr<torch::nn::Module>& module,
                                                   const std::string& name,
                                                   const ShardOptions& options) {
  if (find(*module)) {
    throw ArgumentError(fmt::format(
        "libddp fsdp: module '{}' is wrapped already. Hint: wrap each module once.", name));
  }
  auto wrapped = std::make_shared<WrappedModule>(module, name, own_parameters(*module), options);
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

std::vector<std::shared_ptr<WrappedModule>> WrappedModule::all_in(const torch::nn::Module& root) {
  std::vector<std::shared_ptr<WrappedModule>> all{find(root)};
  for (const auto& child : root.modules(/*include_self=*/false)) {
    if (auto wrapped = find(*child)) all.push_back(std::move(wrapped));
  }
  return all;
}

void WrappedModule::rejoin(const torch::nn::Module& root,
                           const std::function<ShardOptions(const ShardOptions&)>& regroup) {
  std::vector<std::shared_ptr<WrappedModule>> all = all_in(root);
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a->number_ < b->number_; });
  std::vector<ShardOptions> options;
  for (const auto& wrapped : all) options.push_back(regroup(wrapped->options_));
  for (const auto& wrapped : all) wrapped->has_rejoined_ = true;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i]->unit_) all[i]->unit_->leave();
    all[i]->unit_ = nullptr;
    all[i]->make_unit(options[i]);
  }
}

std::shared_ptr<ShardedModel> WrappedModule::join(const torch::nn::Module& root,
                                                  ShardedModelOptions options) {
  const std::vector<std::shared_ptr<WrappedModule>> all = all_in(root);
  std::vector<std::shared_ptr<ParamGroup>> units;
  for (const auto& wrapped : all) units.push_back(wrapped->unit_);
  auto model = ShardedModel::create(std::move(units), std::move(options));
  for (const auto& wrapped : all) wrapped->model_ = model;
  return model;
}

std::unordered_map<const void*, Group> WrappedModule::owners(const Group& around) {
  std::unordered_map<const void*, Group> owners;
  const std::lock_guard lock(wrapped_modules().mutex);
  for (const auto& [module, wrapped] : wrapped_modules().by_module) {
    const ShardOptions& options = wrapped->options_;
    const bool is_of_some =
        around && options.shard && !options.replicate && options.shard->size() < around->size();
    for (const auto& [name, tensor] : wrapped->parameters_) {
      owners[tensor.unsafeGetTensorImpl()] = is_of_some ? around : options.shard;
    }
  }
  return owners;
}

Group WrappedModule::group_of(const torch::nn::Module& module) {
  const auto wrapped = find(module);
  if (!wrapped) return nullptr;
  return wrapped->options_.shard ? wrapped->options_.shard : wrapped->options_.replicate;
}

std::unordered_map<const void*, OwnedPart> WrappedModule::owned_parts(
    const torch::nn::Module& root) {
  std::unordered_map<const void*, OwnedPart> parts;
  for (const auto& wrapped : all_in(root)) {
    if (!wrapped) continue;
    if (!wrapped->unit_) {
      throw StateError(fmt::format(
          "libddp fsdp: the parameters of module '{}' are of no process group: its last rejoin() "
          "has failed. Hint: call it again, on all ranks.",
          wrapped->name_));
    }
    for (const auto& flat : wrapped->unit_->flats()) {
      const FlatSpec& spec = flat->spec();
      for (std::size_t i = 0; i < spec.size(); ++i) {
        const FlatLayout::ShardSpec own = spec.layout.shard(i, spec.rank());
        parts[spec.parameters[i].tensor.unsafeGetTensorImpl()] = {spec.layout.shape(i), own.begin,
                                                                  own.end, spec.is_sharded()};
      }
    }
  }
  return parts;
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
  if (!model && has_rejoined_) {
    throw StateError(fmt::format(
        "libddp fsdp: module '{}' has left its process group and could not join another one: the "
        "model's last rejoin() failed. Hint: call it again, on all ranks.",
        name_));
  }
  if (!model) {
    throw StateError(fmt::format(
        "libddp fsdp: module '{}' is sharded, but the model around it is not wrapped. Hint: create "
        "FullyShardedDataParallel of the whole model after the last fully_shard.",
        name_));
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
  return options_.param_dtype;
}

}  // namespace libddp
