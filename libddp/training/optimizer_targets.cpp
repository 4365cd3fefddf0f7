#include "libddp/training/optimizer_targets.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "libddp/base/error.h"
#include "libddp/optim/adamw.h"
#include "libddp/training/group_settings.h"
#include "libddp/training/optimizer_state.h"

namespace libddp {
namespace {

using torch::optim::OptimizerParamGroup;

/// The names of a group that was saved, sorted.
std::vector<std::string> names_of(const nlohmann::json& values, const std::string& where) {
  const auto found = values.find("params");
  if (found == values.end() || !found->is_array()) {
    throw SnapshotError(fmt::format("libddp training state: {} has no list of parameters.", where));
  }
  std::vector<std::string> names;
  for (const auto& name : *found) names.push_back(name.get<std::string>());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> names_of(const std::vector<const ModulePart*>& parts) {
  std::vector<std::string> names;
  for (const ModulePart* const part : parts) names.push_back(part->name);
  std::sort(names.begin(), names.end());
  return names;
}

void check_same_names(const std::vector<std::string>& saved, const std::vector<std::string>& own,
                      const std::string& where) {
  std::vector<std::string> lacking, extra;
  std::set_difference(saved.begin(), saved.end(), own.begin(), own.end(),
                      std::back_inserter(lacking));
  std::set_difference(own.begin(), own.end(), saved.begin(), saved.end(),
                      std::back_inserter(extra));
  if (lacking.empty() && extra.empty()) return;
  throw ArgumentError(fmt::format(
      "libddp training state: {} has {} '{}', which the optimizer's {}. Hint: make the optimizer "
      "with the groups that it was saved with.",
      where, lacking.empty() ? "no parameter" : "parameter",
      lacking.empty() ? extra.front() : lacking.front(), lacking.empty() ? "has" : "has not"));
}

}  // namespace

OptimizerTargets::OptimizerTargets(torch::optim::Optimizer& optimizer, const ModuleParts& parts,
                                   const Pieces& stored, const nlohmann::json& values)
    : optimizer_(optimizer), kind_(OptimizerKind::of(optimizer)) {
  for (const auto& [key, piece] : stored) {
    if (key.starts_with(OptimizerState::kPrefix)) stored_[key] = piece;
  }
  const auto others = values.find("others");
  if (others != values.end() && !others->empty()) {
    throw ArgumentError(
        "libddp training state: the saved optimizer state has values that are no tensors. Hint: "
        "load it in Python, or without the optimizer.");
  }
  const nlohmann::json& groups = values.at("groups");
  if (groups.size() != optimizer.param_groups().size()) {
    throw ArgumentError(fmt::format(
        "libddp training state: the saved optimizer has {} groups of parameters, this one {}. "
        "Hint: make the optimizer with the groups that it was saved with.",
        groups.size(), optimizer.param_groups().size()));
  }
  for (std::size_t i = 0; i < groups.size(); ++i) add_group(i, parts, groups[i]);
  check_all_taken();
}

void OptimizerTargets::add_group(std::size_t index, const ModuleParts& parts,
                                 const nlohmann::json& values) {
  const std::string where = fmt::format("group {} of the saved optimizer", index);
  OptimizerParamGroup& group = optimizer_.param_groups()[index];
  const auto own = OptimizerState::parts_of(group, parts);
  check_same_names(names_of(values, where), names_of(own), where);
  settings_.push_back(
      settings_from_json(kind_, group.options(), values, where, maximizes(optimizer_)));
  std::vector<const ModulePart*> saved;
  for (const ModulePart* const part : own) {
    if (has_state(*part)) saved.push_back(part);
  }
  if (auto* const adamw = dynamic_cast<AdamW*>(&optimizer_)) {
    std::vector<at::Tensor> parameters;
    for (const ModulePart* const part : saved) parameters.push_back(part->tensor);
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    if (!parameters.empty()) adamw->make_states(parameters, options.amsgrad());
  }
  for (const ModulePart* const part : saved) add_state(*part);
}

bool OptimizerTargets::has_state(const ModulePart& part) const {
  const auto state = kind_.make_state();
  const std::vector<StateField> fields = kind_.fields(*state);
  return std::any_of(fields.begin(), fields.end(), [&](const StateField& field) {
    return stored_.contains(OptimizerState::key(part.name, field.name));
  });
}

void OptimizerTargets::add_state(const ModulePart& part) {
  void* const key = part.tensor.unsafeGetTensorImpl();
  Entry entry{key, kind_.make_state()};
  const auto before = optimizer_.state().find(key);
  const std::vector<StateField> own = before == optimizer_.state().end()
                                          ? std::vector<StateField>{}
                                          : kind_.fields(*before->second);
  const std::vector<StateField> fields = kind_.fields(*entry.state);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto found = stored_.find(OptimizerState::key(part.name, fields[i].name));
    const bool is_count = std::holds_alternative<std::int64_t*>(fields[i].place);
    if (found == stored_.end()) {
      if (!is_count) continue;
      throw ArgumentError(fmt::format(
          "libddp training state: the saved optimizer state of '{}' has no '{}', so it is not of "
          "an {}. Hint: load with the class of optimizer that was saved.",
          part.name, fields[i].name, kind_.name));
    }
    const at::Tensor* const tensor =
        own.empty() || is_count ? nullptr : std::get<at::Tensor*>(own[i].place);
    add_tensor(part, found->second, fields[i], tensor ? *tensor : at::Tensor());
    stored_.erase(found);
  }
  entries_.push_back(std::move(entry));
}

void OptimizerTargets::add_tensor(const ModulePart& part, const Piece& piece,
                                  const StateField& field, const at::Tensor& own) {
  const at::ScalarType dtype = scalar_type_of(piece.dtype);
  if (const auto* const count = std::get_if<std::int64_t*>(&field.place)) {
    counts_.push_back({*count, at::empty(piece.shape, dtype)});
    tensors_.push_back(SnapshotTensor::whole(piece.key, counts_.back().stored));
    return;
  }
  const at::Tensor& parameter = part.tensor;
  const bool fits = own.defined() && own.sizes() == parameter.sizes() && own.scalar_type() == dtype;
  at::Tensor& place = *std::get<at::Tensor*>(field.place);
  place = fits ? own : at::empty(parameter.sizes(), parameter.options().dtype(dtype));
  tensors_.push_back(OptimizerState::moment(piece.key, place, part));
}

void OptimizerTargets::check_all_taken() const {
  if (stored_.empty()) return;
  throw ArgumentError(fmt::format(
      "libddp training state: the saved optimizer state has '{}', which an {} of this module has "
      "not. Hint: load with the class of optimizer that was saved.",
      stored_.begin()->first.substr(OptimizerState::kPrefix.size()), kind_.name));
}

void OptimizerTargets::install() {
  for (const auto& set : settings_) set();
  for (const Count& count : counts_) {
    *count.place = static_cast<std::int64_t>(count.stored.item<double>());
  }
  optimizer_.state().clear();
  for (Entry& entry : entries_) optimizer_.state()[entry.key] = std::move(entry.state);
  entries_.clear();
  if (auto* const adamw = dynamic_cast<AdamW*>(&optimizer_)) adamw->cut_state();
}

}  // namespace libddp
