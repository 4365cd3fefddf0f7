#include "libddp/training/optimizer_kind.h"

#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <typeinfo>

#include "libddp/base/error.h"
#include "libddp/optim/adamw.h"

namespace libddp {
namespace {

using namespace torch::optim;
using Settings = std::vector<OptimizerSetting>;
using Fields = std::vector<StateField>;

template <typename Options>
Settings adam_settings(Options& o) {
  return {{"lr", &o.lr()},
          {"betas", &o.betas()},
          {"eps", &o.eps()},
          {"weight_decay", &o.weight_decay()},
          {"amsgrad", &o.amsgrad()}};
}
Settings settings_of(AdamOptions& o) { return adam_settings(o); }
Settings settings_of(AdamWOptions& o) { return adam_settings(o); }
Settings settings_of(SGDOptions& o) {
  return {{"lr", &o.lr()},
          {"momentum", &o.momentum()},
          {"dampening", &o.dampening()},
          {"weight_decay", &o.weight_decay()},
          {"nesterov", &o.nesterov()}};
}
Settings settings_of(AdagradOptions& o) {
  return {{"lr", &o.lr()},
          {"lr_decay", &o.lr_decay()},
          {"weight_decay", &o.weight_decay()},
          {"initial_accumulator_value", &o.initial_accumulator_value()},
          {"eps", &o.eps()}};
}
Settings settings_of(RMSpropOptions& o) {
  return {{"lr", &o.lr()},
          {"alpha", &o.alpha()},
          {"eps", &o.eps()},
          {"weight_decay", &o.weight_decay()},
          {"momentum", &o.momentum()},
          {"centered", &o.centered()}};
}

template <typename State>
Fields adam_fields(State& s) {
  return {{"step", &s.step()},
          {"exp_avg", &s.exp_avg()},
          {"exp_avg_sq", &s.exp_avg_sq()},
          {"max_exp_avg_sq", &s.max_exp_avg_sq()}};
}
Fields fields_of(AdamParamState& s) { return adam_fields(s); }
Fields fields_of(AdamWParamState& s) { return adam_fields(s); }
Fields fields_of(SGDParamState& s) { return {{"momentum_buffer", &s.momentum_buffer()}}; }
Fields fields_of(AdagradParamState& s) { return {{"step", &s.step()}, {"sum", &s.sum()}}; }
Fields fields_of(RMSpropParamState& s) {
  return {{"step", &s.step()},
          {"square_avg", &s.square_avg()},
          {"momentum_buffer", &s.momentum_buffer()},
          {"grad_avg", &s.grad_avg()}};
}

int num_moments_of(const AdamOptions& o) { return o.amsgrad() ? 3 : 2; }
int num_moments_of(const AdamWOptions& o) { return o.amsgrad() ? 3 : 2; }
int num_moments_of(const SGDOptions& o) { return o.momentum() == 0 ? 0 : 1; }
int num_moments_of(const AdagradOptions&) { return 1; }
int num_moments_of(const RMSpropOptions& o) {
  return 1 + (o.momentum() > 0 ? 1 : 0) + (o.centered() ? 1 : 0);
}

template <typename Options, typename State>
constexpr OptimizerKind kind(std::string_view name,
                             std::optional<bool> decouples_weight_decay = std::nullopt) {
  return {name,
          decouples_weight_decay,
          [](const OptimizerOptions& options) {
            return dynamic_cast<const Options*>(&options) != nullptr;
          },
          [](OptimizerOptions& options) { return settings_of(static_cast<Options&>(options)); },
          []() -> std::unique_ptr<OptimizerParamState> { return std::make_unique<State>(); },
          [](OptimizerParamState& state) { return fields_of(dynamic_cast<State&>(state)); },
          [](const OptimizerOptions& options) {
            return num_moments_of(static_cast<const Options&>(options));
          }};
}

constexpr std::array kKinds{
    kind<AdamWOptions, AdamWParamState>("AdamW", true),
    kind<AdamOptions, AdamParamState>("Adam", false),
    kind<SGDOptions, SGDParamState>("SGD"),
    kind<AdagradOptions, AdagradParamState>("Adagrad"),
    kind<RMSpropOptions, RMSpropParamState>("RMSprop"),
};

}  // namespace

const OptimizerKind& OptimizerKind::of(const Optimizer& optimizer) {
  const OptimizerOptions& options = optimizer.defaults();
  for (const OptimizerKind& kind : kKinds) {
    if (kind.has(options)) return kind;
  }
  throw ArgumentError(fmt::format(
      "libddp training state: an optimizer with options of class '{}' cannot be saved by name. "
      "Hint: AdamW, Adam, SGD, Adagrad and RMSprop can; save another one by torch::save into a "
      "tensor of bytes that goes into the snapshot beside a TrainingState without optimizer.",
      typeid(options).name()));
}

bool maximizes(const Optimizer& optimizer) {
  const auto* const own = dynamic_cast<const libddp::AdamW*>(&optimizer);
  return own != nullptr && own->maximizes();
}

}  // namespace libddp
