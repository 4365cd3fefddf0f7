#include "libddp/optim/fused_adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/optim/device_adamw.h"

namespace libddp {
namespace {

using Tensors = std::vector<at::Tensor>;

bool follows(const at::Tensor& before, const at::Tensor& after) {
  const auto* const end = static_cast<const std::byte*>(before.const_data_ptr()) + before.nbytes();
  return before.scalar_type() == after.scalar_type() && after.is_contiguous() &&
         static_cast<const std::byte*>(after.const_data_ptr()) == end;
}

float step_of(const at::Tensor& step) { return *step.const_data_ptr<float>(); }

/// Entries [begin, end) that the kernel may take for one tensor.
struct Run {
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::int64_t numel_of(const Tensors& list, const Run& run) {
  std::int64_t numel = 0;
  for (std::size_t i = run.begin; i < run.end; ++i) numel += list[i].numel();
  return numel;
}

/// Consecutive entries of which each list's tensors are adjacent; the last list is the steps.
class Runs {
 public:
  Runs(std::vector<const Tensors*> lists, const Tensors& steps)
      : lists_(std::move(lists)), steps_(steps) {}

  /// Empty tensors belong to whatever run they stand in.
  std::vector<Run> find() const {
    std::vector<Run> runs;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (lists_[0]->at(i).numel() == 0) continue;
      if (!runs.empty() && joins(runs.back().end - 1, i)) {
        runs.back().end = i + 1;
      } else {
        runs.push_back({i, i + 1});
      }
    }
    return runs;
  }

  /// The tensors of `list` as the kernel sees them.
  static Tensors merged(const Tensors& list, const std::vector<Run>& runs) {
    Tensors result;
    for (const Run& run : runs) {
      const at::Tensor& first = list[run.begin];
      if (run.end == run.begin + 1) {
        result.push_back(first);
        continue;
      }
      result.push_back(at::from_blob(first.data_ptr(), {numel_of(list, run)}, first.options()));
    }
    return result;
  }

 private:
  bool joins(std::size_t last, std::size_t i) const {
    for (const Tensors* list : lists_) {
      if (!(*list)[last].is_contiguous() || !follows((*list)[last], (*list)[i])) return false;
    }
    return step_of(steps_[i]) == step_of(steps_[last]);
  }

  std::vector<const Tensors*> lists_;
  const Tensors& steps_;
};

/// What the kernel goes through element by element, from the beginning of memory to the end: all of
/// one entry in the order of its parameter, or contiguous where that has gaps. What lies otherwise
/// (a gradient that a script has assigned, a state of a model in another memory format) takes part
/// as a copy.
class InOneOrder {
 public:
  explicit InOneOrder(const Tensors& parameters) : parameters_(parameters) {}

  /// `list` as the kernel wants it.
  Tensors read(const Tensors& list) const {
    Tensors result;
    for (std::size_t i = 0; i < list.size(); ++i) {
      result.push_back(is_in_order(list[i], parameters_[i]) ? list[i]
                                                            : copied(list[i], parameters_[i]));
    }
    return result;
  }

  /// The results go back to where the copies were taken from.
  static void write(const Tensors& list, const Tensors& results) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!results[i].is_same(list[i])) at::Tensor(list[i]).copy_(results[i]);
    }
  }

 private:
  static bool is_in_order(const at::Tensor& tensor, const at::Tensor& parameter) {
    if (!parameter.is_non_overlapping_and_dense()) return tensor.is_contiguous();
    if (tensor.strides() == parameter.strides()) return true;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) > 1 && tensor.stride(dim) != parameter.stride(dim)) return false;
    }
    return true;
  }

  static at::Tensor copied(const at::Tensor& tensor, const at::Tensor& parameter) {
    const at::TensorOptions options = tensor.options().requires_grad(false);
    at::Tensor copy = parameter.is_non_overlapping_and_dense()
                          ? at::empty_strided(parameter.sizes(), parameter.strides(), options)
                          : at::empty(parameter.sizes(), options);
    return copy.copy_(tensor);
  }

  const Tensors& parameters_;
};

/// Zeros like `tensor` over the beginning of `memory`. Strides as the parameter's: the kernel goes
/// through memory.
at::Tensor zeros_over(const at::Tensor& memory, const at::Tensor& tensor) {
  const at::Tensor part = memory.narrow(0, 0, tensor.numel());
  return tensor.is_non_overlapping_and_dense() ? part.as_strided(tensor.sizes(), tensor.strides())
                                               : part.view(tensor.sizes());
}

/// Zeros like the tensors, adjacent where those are.
Tensors zeros_like_runs(const Tensors& tensors) {
  Tensors zeros(tensors.size());
  const Tensors no_steps(tensors.size(), at::zeros({}, at::kFloat));
  for (const Run& run : Runs({&tensors}, no_steps).find()) {
    const std::int64_t numel = numel_of(tensors, run);
    at::Tensor rest = at::zeros({numel}, tensors[run.begin].options().requires_grad(false));
    for (std::size_t i = run.begin; i < run.end; ++i) {
      zeros[i] = zeros_over(rest, tensors[i]);
      rest = rest.narrow(0, tensors[i].numel(), rest.numel() - tensors[i].numel());
    }
  }
  for (std::size_t i = 0; i < zeros.size(); ++i) {
    if (!zeros[i].defined()) zeros[i] = at::zeros_like(tensors[i].detach());
  }
  return zeros;
}

/// The kernel reads and writes as many elements of each as its parameter has, in any memory.
void check_gradients(const Tensors& parameters, const Tensors& gradients) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (gradients[i].numel() == parameters[i].numel()) continue;
    throw StateError(
        fmt::format("libddp: AdamW: gradient {} has {} elements, its parameter {}. Hint: gradients "
                    "that sharded units have under no_sync are not averaged yet; step after a pass "
                    "outside of it.",
                    i, gradients[i].numel(), parameters[i].numel()));
  }
}

void check_moments(const Tensors& parameters, const Tensors& moments, const char* name) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool is_there = i < moments.size() && moments[i].defined();
    const std::int64_t numel = is_there ? moments[i].numel() : 0;
    if (numel == parameters[i].numel()) continue;
    throw StateError(
        fmt::format("libddp: AdamW: {} of parameter {} has {} elements, the parameter {}. Hint: an "
                    "optimizer's state is that of the parameters that it was made or saved with; "
                    "make it after the model is sharded, and load a state of the same model, ranks "
                    "and settings.",
                    name, i, numel, parameters[i].numel()));
  }
}

void check_sizes(const Tensors& parameters, const Tensors& gradients, const AdamwState& state,
                 bool amsgrad) {
  check_gradients(parameters, gradients);
  check_moments(parameters, state.exp_avgs, "exp_avg");
  check_moments(parameters, state.exp_avg_sqs, "exp_avg_sq");
  if (amsgrad) check_moments(parameters, state.max_exp_avg_sqs, "max_exp_avg_sq");
}

std::size_t update_runs(const Tensors& parameters, const Tensors& gradients,
                        const AdamwState& state, const AdamwOptions& options,
                        const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  for (const at::Tensor& step : state.steps) *step.mutable_data_ptr<float>() += 1;
  std::vector<const Tensors*> lists{&parameters, &gradients, &state.exp_avgs, &state.exp_avg_sqs};
  if (options.amsgrad) lists.push_back(&state.max_exp_avg_sqs);
  const std::vector<Run> runs = Runs(lists, state.steps).find();
  if (runs.empty()) return 0;
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  Tensors steps;
  for (const Run& run : runs) steps.push_back(state.steps[run.begin]);
  Tensors merged = Runs::merged(parameters, runs);
  Tensors averages = Runs::merged(state.exp_avgs, runs);
  Tensors squares = Runs::merged(state.exp_avg_sqs, runs);
  Tensors largest;
  if (options.amsgrad) largest = Runs::merged(state.max_exp_avg_sqs, runs);
  at::_fused_adamw_(merged, Runs::merged(gradients, runs), averages, squares, largest, steps,
                    options.lr, options.beta1, options.beta2, options.weight_decay, options.eps,
                    options.amsgrad, options.maximize, optional(grad_scale), optional(found_inf));
  return runs.size();
}

}  // namespace

AdamwState make_adamw_state(const Tensors& parameters, bool amsgrad) {
  AdamwState state;
  state.exp_avgs = zeros_like_runs(parameters);
  state.exp_avg_sqs = zeros_like_runs(parameters);
  if (amsgrad) state.max_exp_avg_sqs = zeros_like_runs(parameters);
  for (const at::Tensor& parameter : parameters) {
    state.steps.push_back(
        at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(parameter.device())));
  }
  return state;
}

std::size_t fused_adamw(const Tensors& parameters, const Tensors& gradients,
                        const AdamwState& state, const AdamwOptions& options,
                        const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  const c10::NoGradGuard no_grad;
  const bool is_on_device = !parameters.empty() && !parameters.front().device().is_cpu();
  if (!is_on_device && found_inf.defined() && found_inf.item<float>() != 0) return 0;
  check_sizes(parameters, gradients, state, options.amsgrad);
  const InOneOrder order(parameters);
  const Tensors values = order.read(parameters);
  const Tensors slopes = order.read(gradients);
  AdamwState ordered{order.read(state.exp_avgs), order.read(state.exp_avg_sqs),
                     order.read(state.max_exp_avg_sqs), state.steps};
  const auto update = is_on_device ? &update_on_device : &update_runs;
  const std::size_t num_runs = update(values, slopes, ordered, options, grad_scale, found_inf);
  InOneOrder::write(parameters, values);
  // The kernel leaves gradients without the scale; one that is expanded cannot take that.
  for (std::size_t i = 0; grad_scale.defined() && i < gradients.size(); ++i) {
    if (gradients[i].is_non_overlapping_and_dense()) {
      InOneOrder::write({gradients[i]}, {slopes[i]});
    }
  }
  InOneOrder::write(state.exp_avgs, ordered.exp_avgs);
  InOneOrder::write(state.exp_avg_sqs, ordered.exp_avg_sqs);
  InOneOrder::write(state.max_exp_avg_sqs, ordered.max_exp_avg_sqs);
  return num_runs;
}

}  // namespace libddp
