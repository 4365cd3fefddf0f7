#include "libddp/training/optimizer_state.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <memory>
#include <utility>
#include <variant>

#include "libddp/base/error.h"
#include "libddp/module/each_once.h"
#include "libddp/optim/adamw.h"
#include "libddp/training/group_settings.h"

namespace libddp {
namespace {

/// Up to here float32 has every integer; Python's optimizers count in it.
constexpr std::int64_t kFloatSteps = 1 << 24;

at::Tensor as_tensor(std::int64_t count) {
  return at::full({}, count, count <= kFloatSteps ? at::kFloat : at::kDouble);
}

}  // namespace

OptimizerState::OptimizerState(torch::optim::Optimizer& optimizer, const ModuleParts& parts)
    : kind_(OptimizerKind::of(optimizer)) {
  std::vector<std::vector<const ModulePart*>> groups;
  for (const auto& group : optimizer.param_groups()) groups.push_back(parts_of(group, parts));
  const auto* const shared = dynamic_cast<const AdamW*>(&optimizer);
  const auto whole = shared ? shared->with_whole_state() : nullptr;
  const auto& states = whole ? whole->state() : optimizer.state();
  auto listed = nlohmann::json::array();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    auto names = nlohmann::json::array();
    for (const ModulePart* const part : groups[i]) {
      names.push_back(part->name);
      const auto found = states.find(part->tensor.unsafeGetTensorImpl());
      if (found != states.end()) add(*part, *found->second);
    }
    listed.push_back(
        settings_as_json(kind_, optimizer.param_groups()[i].options(), maximizes(optimizer)));
    listed.back()["params"] = std::move(names);
  }
  values_ = {{"groups", std::move(listed)},
             {"others", nlohmann::json::object()},
             {"more", nlohmann::json::object()}};
}

void OptimizerState::add(const ModulePart& part, torch::optim::OptimizerParamState& state) {
  for (const StateField& field : kind_.fields(state)) {
    const std::string key = OptimizerState::key(part.name, field.name);
    if (const auto* const count = std::get_if<std::int64_t*>(&field.place)) {
      tensors_.push_back(SnapshotTensor::whole(
          key, as_tensor(**count), part.is_sharded ? StoredBy::EachRank : StoredBy::FirstOfHost));
      continue;
    }
    const at::Tensor& tensor = *std::get<at::Tensor*>(field.place);
    if (!tensor.defined()) continue;
    if (tensor.sizes() != part.tensor.sizes()) {
      throw ArgumentError(fmt::format(
          "libddp training state: the optimizer's '{}' of parameter '{}' has shape [{}], the "
          "parameter [{}]. Hint: save between steps, with the optimizer of this module.",
          field.name, part.name, fmt::join(tensor.sizes(), ", "),
          fmt::join(part.tensor.sizes(), ", ")));
    }
    tensors_.push_back(moment(key, tensor, part));
  }
}

std::string OptimizerState::key(const std::string& parameter, std::string_view field) {
  return fmt::format("{}{}.{}", kPrefix, parameter, field);
}

SnapshotTensor OptimizerState::moment(std::string key, at::Tensor tensor, const ModulePart& part) {
  return {std::move(key), std::move(tensor),
          part.shape,     part.begin,
          part.end,       part.is_sharded ? StoredBy::EachRank : StoredBy::HostTogether};
}

std::vector<const ModulePart*> OptimizerState::parts_of(
    const torch::optim::OptimizerParamGroup& group, const ModuleParts& parts) {
  std::vector<const ModulePart*> found;
  for (const at::Tensor& parameter : each_once(group.params())) {
    const auto place = parts.places.find(parameter.unsafeGetTensorImpl());
    if (place == parts.places.end()) {
      throw ArgumentError(fmt::format(
          "libddp training state: the optimizer has a parameter of shape [{}] that the module has "
          "not. Hint: give the module that the optimizer was made for.",
          fmt::join(parameter.sizes(), ", ")));
    }
    found.push_back(&parts.tensors[place->second]);
  }
  return found;
}

}  // namespace libddp
