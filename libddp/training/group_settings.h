#pragma once

// The settings of an optimizer's group as JSON, under the names and in the form that Python's
// param_groups have in a snapshot. Thread rule: pure functions.
//
//   settings_as_json(kind, options, false);   // {"betas": {"$tuple": [0.9, 0.999]}, "lr": 0.001}
//   settings_from_json(kind, options, values, "group 0", false)();

#include <torch/optim/optimizer.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "libddp/training/optimizer_kind.h"

namespace libddp {

/// `options` is not changed: places in it cannot be had of a constant.
nlohmann::json settings_as_json(const OptimizerKind& kind, torch::optim::OptimizerOptions& options,
                                bool maximizes);

/// What sets them. Throws ArgumentError for settings of another kind of optimizer, and for those of
/// Python that LibTorch's has no counterpart of and that change its results. `maximizes`: what that
/// one is here.
std::function<void()> settings_from_json(const OptimizerKind& kind,
                                         torch::optim::OptimizerOptions& options,
                                         const nlohmann::json& values, const std::string& where,
                                         bool maximizes);

}  // namespace libddp
