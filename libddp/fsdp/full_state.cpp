#include "libddp/fsdp/full_state.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "libddp/base/error.h"
#include "libddp/fsdp/sharded_model.h"
#include "libddp/module/module_tensors.h"

namespace libddp {
namespace {

NamedTensors parameters_and_buffers(const torch::nn::Module& module) {
  NamedTensors all = named_parameters(module);
  for (NamedTensor& buffer : named_buffers(module)) all.push_back(std::move(buffer));
  return all;
}

std::vector<std::string> problems_of(const NamedTensors& wanted, const FullState& state) {
  std::vector<std::string> problems;
  FullState unknown = state;
  for (const auto& [name, tensor] : wanted) {
    const auto node = unknown.extract(name);
    if (node.empty()) {
      problems.push_back(fmt::format("'{}' is missing", name));
    } else if (node.mapped().sizes() != tensor.sizes()) {
      problems.push_back(fmt::format("'{}' has the shape [{}], the model [{}]", name,
                                     fmt::join(node.mapped().sizes(), ", "),
                                     fmt::join(tensor.sizes(), ", ")));
    }
  }
  for (const auto& [name, tensor] : unknown) {
    problems.push_back(fmt::format("'{}' is not in the model", name));
  }
  return problems;
}

}  // namespace

void with_full_params(ShardedModel& model, const std::function<void()>& function, bool writeback) {
  model.show_copies();
  try {
    function();
  } catch (...) {
    model.end_copies(false);
    throw;
  }
  model.end_copies(writeback);
}

FullState full_state(ShardedModel& model, const torch::nn::Module& module) {
  FullState state;
  const auto copy = [&] {
    for (const NamedTensor& parameter : named_parameters(module)) {
      // A copy that nobody else keeps.
      state[parameter.name] = parameter.tensor.tensor_data();
    }
    for (const NamedTensor& buffer : named_buffers(module)) {
      state[buffer.name] = buffer.tensor.detach().clone();
    }
  };
  with_full_params(model, copy, /*writeback=*/false);
  return state;
}

void load_full_state(ShardedModel& model, const torch::nn::Module& module, const FullState& state) {
  const auto load = [&] {
    const NamedTensors wanted = parameters_and_buffers(module);
    const auto problems = problems_of(wanted, state);
    if (!problems.empty()) {
      throw ArgumentError(
          fmt::format("libddp fsdp: the state does not fit the model: {}. Hint: load what "
                      "full_state gave for the same model.",
                      fmt::join(problems, "; ")));
    }
    const c10::NoGradGuard no_grad;
    for (const auto& [name, tensor] : wanted) at::Tensor(tensor).copy_(state.at(name));
  };
  with_full_params(model, load, /*writeback=*/true);
}

}  // namespace libddp
