#include "libddp/training/training_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/module/module_tensors.h"
#include "libddp/slots/json_text.h"
#include "libddp/snapshot/saved_version.h"
#include "libddp/training/module_parts.h"
#include "libddp/training/optimizer_kind.h"
#include "libddp/training/optimizer_state.h"
#include "libddp/training/optimizer_targets.h"

namespace libddp {
namespace {

using nlohmann::json;

/// Of the values, which Python's Snapshot shares.
constexpr int kFormat = 1;
constexpr std::string_view kModel = "model.";

std::vector<SnapshotTensor> tensors_of(const ModuleParts& parts) {
  std::vector<SnapshotTensor> tensors;
  for (const ModulePart& part : parts.tensors) {
    const StoredBy by = part.is_sharded  ? StoredBy::EachRank
                        : part.is_buffer ? StoredBy::FirstOfHost
                                         : StoredBy::HostTogether;
    tensors.push_back({fmt::format("{}{}", kModel, part.name), part.tensor.detach(), part.shape,
                       part.begin, part.end, by});
  }
  return tensors;
}

at::Generator generator_of(const at::Device& device) {
  return device.is_cpu() ? at::detail::getDefaultCPUGenerator()
                         : at::globalContext().defaultGenerator(device);
}

/// Of CUDA, those up to the last one that has a parameter: Python lists them by their numbers.
std::vector<at::Device> cuda_devices_of(const ModuleParts& parts) {
  int last = -1;
  for (const ModulePart& part : parts.tensors) {
    const at::Device device = part.tensor.device();
    if (device.is_cuda()) last = std::max<int>(last, device.index());
  }
  std::vector<at::Device> devices;
  for (int i = 0; i <= last; ++i) {
    devices.emplace_back(at::kCUDA, static_cast<at::DeviceIndex>(i));
  }
  return devices;
}

at::Tensor generator_state(const at::Device& device) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const at::Device& device, const at::Tensor& state) {
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

json parse_extra(std::string_view extra) {
  try {
    return parse_json(extra);
  } catch (const SnapshotError& error) {
    throw ArgumentError(
        fmt::format("libddp training state: save: extra is {}. Hint: pass JSON.", error.what()));
  }
}

/// Throws ArgumentError for what is neither a TrainingState's nor of Python's Snapshot with a
/// model.
json values_of(const SavedVersion& version) {
  json values = parse_json(version.values());
  if (!values.is_object() || values.value("format", json()) != kFormat) {
    throw ArgumentError(
        fmt::format("libddp training state: {} was not saved by a TrainingState. Hint: load what "
                    "Snapshot::save was given through Snapshot::load.",
                    version.name()));
  }
  if (!values.contains("model")) {
    throw ArgumentError(
        fmt::format("libddp training state: {} has no module. Hint: it was saved in Python from a "
                    "state= that only Python's load() returns.",
                    version.name()));
  }
  return values;
}

void check_no_other_tensors(const SavedVersion& version, const ModuleParts& parts) {
  std::map<std::string, const ModulePart*> own;
  for (const ModulePart& part : parts.tensors) own[part.name] = &part;
  for (const auto& [key, piece] : version.pieces()) {
    if (!key.starts_with(kModel) || own.contains(key.substr(kModel.size()))) continue;
    throw ArgumentError(fmt::format(
        "libddp training state: {} has '{}', which the module has not. Hint: load into the module "
        "that was saved.",
        version.name(), key.substr(kModel.size())));
  }
}

struct GeneratorTarget {
  at::Device device;
  SnapshotTensor tensor;
};

/// For what was saved of the generators that are here: the CPU's is "torch", "cuda" a list.
std::vector<GeneratorTarget> generator_targets(const SavedVersion& version, const json& values,
                                               const ModuleParts& parts) {
  std::vector<GeneratorTarget> targets;
  const auto add = [&](const json& encoded, const at::Device& device) {
    const auto key = encoded.at("$tensor").get<std::string>();
    const auto piece = version.pieces().find(key);
    if (piece == version.pieces().end()) return;
    targets.push_back(
        {device, SnapshotTensor::whole(key, at::empty(piece->second.shape, at::kByte))});
  };
  const json random = values.value("random", json::object());
  if (random.contains("torch")) add(random.at("torch"), at::kCPU);
  const json saved = random.value("cuda", json::array());
  const std::vector<at::Device> devices = cuda_devices_of(parts);
  for (std::size_t i = 0; i < std::min(saved.size(), devices.size()); ++i) {
    add(saved[i], devices[i]);
  }
  return targets;
}

}  // namespace

TrainingState::TrainingState(std::shared_ptr<torch::nn::Module> module,
                             torch::optim::Optimizer* optimizer)
    : module_(required(std::move(module), "TrainingState")), optimizer_(optimizer) {
  if (optimizer_) OptimizerKind::of(*optimizer_);
}

Snapshot::Report TrainingState::save(Snapshot& snapshot, std::int64_t step, std::string_view extra,
                                     Storage storage) {
  const c10::NoGradGuard no_grad;
  std::vector<SnapshotTensor> tensors;
  json values;
  snapshot.together(fmt::format("save step {}", step), [&] {
    const ModuleParts parts = ModuleParts::of(*module_);
    tensors = tensors_of(parts);
    values = {{"format", kFormat},
              {"extra", parse_extra(extra)},
              {"stateful", json::object()},
              {"model", {{"values", json::object()}, {"aliases", parts.aliases}}},
              {"optimizer", json::object()}};
    if (optimizer_) {
      const OptimizerState state(*optimizer_, parts);
      tensors.insert(tensors.end(), state.tensors().begin(), state.tensors().end());
      values["optimizer"] = state.values();
    }
    const auto add_generator = [&](const at::Device& device) {
      const std::string key = fmt::format("rank-{}.random.{}", snapshot.rank(), tensors.size());
      tensors.push_back(SnapshotTensor::whole(key, generator_state(device), StoredBy::EachRank));
      return json{{"$tensor", key}};
    };
    values["random"]["torch"] = add_generator(at::kCPU);
    for (const at::Device& device : cuda_devices_of(parts)) {
      values["random"]["cuda"].push_back(add_generator(device));
    }
  });
  return snapshot.save(step, tensors, to_text(values), storage);
}

std::optional<std::int64_t> TrainingState::load(Snapshot& snapshot, std::string* extra) {
  const c10::NoGradGuard no_grad;
  const auto step =
      snapshot.load_newest([&](SavedVersion& version) { take(snapshot, version, extra); });
  if (!step) prepare(snapshot);
  return step;
}

void TrainingState::take(Snapshot& snapshot, SavedVersion& version, std::string* extra) {
  snapshot.open(version);
  const std::string what = fmt::format("load {}", version.name());
  json values;
  std::vector<SnapshotTensor> wanted;
  std::optional<OptimizerTargets> optimizer;
  std::vector<GeneratorTarget> generators;
  snapshot.together(what, [&] {
    values = values_of(version);
    const ModuleParts parts = ModuleParts::of(*module_);
    check_no_other_tensors(version, parts);
    wanted = tensors_of(parts);
    if (optimizer_) {
      const json saved = values.value("optimizer", json::object());
      if (!saved.contains("groups")) {
        throw ArgumentError(
            fmt::format("libddp training state: {} has no optimizer. Hint: load it with a "
                        "TrainingState that has none.",
                        version.name()));
      }
      optimizer.emplace(*optimizer_, parts, version.pieces(), saved);
      wanted.insert(wanted.end(), optimizer->tensors().begin(), optimizer->tensors().end());
    }
    generators = generator_targets(version, values, parts);
    for (const GeneratorTarget& target : generators) wanted.push_back(target.tensor);
  });
  snapshot.read(version, wanted);
  snapshot.together(what, [&] {
    if (optimizer) optimizer->install();
    for (const auto& [device, state] : generators) set_generator_state(device, state.tensor);
  });
  if (extra) *extra = values.value("extra", json::object()).dump();
}

// What cannot be kept is the first save's to say.
void TrainingState::prepare(Snapshot& snapshot) const {
  const ModuleParts parts = ModuleParts::of(*module_);
  std::vector<SnapshotTensor> tensors = tensors_of(parts);
  if (optimizer_) {
    const OptimizerKind& kind = OptimizerKind::of(*optimizer_);
    for (auto& group : optimizer_->param_groups()) {
      const auto own = OptimizerState::parts_of(group, parts);
      for (int moment = 0; moment < kind.num_moments(group.options()); ++moment) {
        for (const ModulePart* const part : own) {
          tensors.push_back(
              OptimizerState::moment(OptimizerState::key(part->name, std::to_string(moment)),
                                     part->tensor.detach(), *part));
        }
      }
    }
  }
  snapshot.prepare(tensors);
}

}  // namespace libddp
