#include "libddp/fsdp/full_state.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/param_group.h"
#include "libddp/fsdp/sharded_model.h"
#include "libddp/module/module_tensors.h"

namespace libddp {
namespace {

NamedTensors parameters_and_buffers(const torch::nn::Module& module) {
  NamedTensors all = registered_parameters(module);
  for (NamedTensor& buffer : named_buffers(module)) all.push_back(std::move(buffer));
  return all;
}

/// Whether any rank of the model's groups says so. Collective; this rank's own word where a group
/// has failed, of which the next collective tells.
bool is_on_any_rank(const ShardedModel& model, bool here) {
  std::vector<Group> groups;
  for (const auto& unit : model.units()) {
    for (const Group& group : {unit->options().shard, unit->options().replicate}) {
      const bool is_known = std::find(groups.begin(), groups.end(), group) != groups.end();
      if (group && group->size() > 1 && !is_known) groups.push_back(group);
    }
  }
  c10::Device device = c10::DeviceType::CPU;
  for (const auto& unit : model.units()) {
    for (const auto& flat : unit->flats()) device = flat->spec().device;
  }
  try {
    const at::Tensor word = at::full({1}, here ? 1 : 0, at::kByte);
    for (const Group& group : groups) {
      // What another library's engine moves are tensors of the model's device, perhaps only these.
      const at::Tensor there = group->moves(c10::DeviceType::CPU) ? word : word.to(device);
      group->all_reduce(there, {ReduceOp::Max}, {.label = "whether parameters are kept"});
      word.copy_(there);
    }
    return word.item<std::uint8_t>() != 0;
  } catch (const Error&) {
    return here;
  }
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
  std::exception_ptr problem;
  try {
    function();
  } catch (...) {
    problem = std::current_exception();
  }
  // Rows of one rank beside older ones of another are no state of the model.
  const bool is_other = writeback && is_on_any_rank(model, problem != nullptr) && !problem;
  model.end_copies(writeback && !problem && !is_other);
  if (problem) std::rethrow_exception(problem);
  if (is_other) {
    throw PeerError(
        "libddp fsdp: what ran with whole parameters has thrown on another rank, so no rank keeps "
        "its changes. Hint: look at the other ranks' output.",
        /*peer_rank=*/-1);
  }
}

FullState full_state(ShardedModel& model, const torch::nn::Module& module) {
  FullState state;
  const auto copy = [&] {
    for (const NamedTensor& parameter : registered_parameters(module)) {
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
    const bool is_refused = is_on_any_rank(model, !problems.empty());  // before buffers change
    if (!problems.empty()) {
      throw ArgumentError(
          fmt::format("libddp fsdp: the state does not fit the model: {}. Hint: load what "
                      "full_state gave for the same model.",
                      fmt::join(problems, "; ")));
    }
    if (is_refused) {
      throw PeerError(
          "libddp fsdp: the state of another rank does not fit the model, so none is loaded. Hint: "
          "look at the other ranks' output.",
          /*peer_rank=*/-1);
    }
    const c10::NoGradGuard no_grad;
    for (const auto& [name, tensor] : wanted) at::Tensor(tensor).copy_(state.at(name));
  };
  with_full_params(model, load, /*writeback=*/true);
}

}  // namespace libddp
