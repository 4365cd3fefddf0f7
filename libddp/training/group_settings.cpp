#include "libddp/training/group_settings.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <tuple>
#include <variant>
#include <vector>

#include "libddp/base/error.h"

namespace libddp {
namespace {

using nlohmann::json;
using Betas = std::tuple<double, double>;

constexpr const char* kDecoupled = "decoupled_weight_decay";
constexpr const char* kMaximize = "maximize";

/// JSON has no infinity.
json as_json(double number) {
  if (std::isfinite(number)) return number;
  return json{{"$float", std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
}
json as_json(bool value) { return value; }
json as_json(const Betas& betas) {
  const auto [first, second] = betas;
  return json{{"$tuple", json::array({as_json(first), as_json(second)})}};
}

/// One key of an object that has no other; null if it is none.
const json* only(const json& value, const char* key) {
  if (!value.is_object() || value.size() != 1) return nullptr;
  const auto found = value.find(key);
  return found == value.end() ? nullptr : &*found;
}

[[noreturn]] void refuse(const std::string& where, std::string_view name, const json& value) {
  throw ArgumentError(fmt::format(
      "libddp training state: {} has {} = {}, which this optimizer cannot take. Hint: load with "
      "the class of optimizer that was saved; a learning rate that is a tensor is Python's alone.",
      where, name, value.dump()));
}

void read(const json& value, double& place, const std::string& where, std::string_view name) {
  if (value.is_number()) {
    place = value.get<double>();
  } else if (const json* const text = only(value, "$float"); text && text->is_string()) {
    place = std::strtod(text->get<std::string>().c_str(), nullptr);
  } else {
    refuse(where, name, value);
  }
}
void read(const json& value, bool& place, const std::string& where, std::string_view name) {
  if (!value.is_boolean()) refuse(where, name, value);
  place = value.get<bool>();
}
void read(const json& value, Betas& place, const std::string& where, std::string_view name) {
  const json* items = only(value, "$tuple");
  if (!items && value.is_array()) items = &value;
  if (!items || !items->is_array() || items->size() != 2) refuse(where, name, value);
  read((*items)[0], std::get<0>(place), where, name);
  read((*items)[1], std::get<1>(place), where, name);
}

void check(const json& values, const char* name, bool wanted, const std::string& where) {
  const auto found = values.find(name);
  if (found != values.end() && *found != json(wanted)) refuse(where, name, *found);
}

}  // namespace

json settings_as_json(const OptimizerKind& kind, torch::optim::OptimizerOptions& options,
                      bool maximizes) {
  json values = json::object();
  for (const OptimizerSetting& setting : kind.settings(options)) {
    std::visit([&](auto* place) { values[std::string(setting.name)] = as_json(*place); },
               setting.place);
  }
  if (kind.decouples_weight_decay) values[kDecoupled] = *kind.decouples_weight_decay;
  if (maximizes) values[kMaximize] = true;
  return values;
}

std::function<void()> settings_from_json(const OptimizerKind& kind,
                                         torch::optim::OptimizerOptions& options,
                                         const json& values, const std::string& where,
                                         bool maximizes) {
  if (kind.decouples_weight_decay) check(values, kDecoupled, *kind.decouples_weight_decay, where);
  check(values, kMaximize, maximizes, where);
  std::vector<std::function<void()>> assignments;
  for (const OptimizerSetting& setting : kind.settings(options)) {
    const auto found = values.find(std::string(setting.name));
    if (found == values.end()) {
      throw ArgumentError(
          fmt::format("libddp training state: {} has no '{}', so it is not of an {}. Hint: load "
                      "with the class of optimizer that was saved.",
                      where, setting.name, kind.name));
    }
    std::visit(
        [&](auto* place) {
          auto value = *place;
          read(*found, value, where, setting.name);
          assignments.push_back([place, value] { *place = value; });
        },
        setting.place);
  }
  return [assignments] {
    for (const auto& assign : assignments) assign();
  };
}

}  // namespace libddp
