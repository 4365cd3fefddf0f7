#include "libddp/fsdp/param_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/module/model_check.h"

namespace libddp {
namespace {

std::string refusal(const std::string& unit, const std::string& parameter, const std::string& what,
                    const std::string& hint) {
  return fmt::format("libddp fsdp: unit '{}': parameter '{}' {}. Hint: {}.", unit, parameter, what,
                     hint);
}

/// Why a parameter cannot be sharded; empty if it can.
std::string problem_of(const std::string& unit, const NamedTensor& parameter, OwnedTensors& owned) {
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    return refusal(
        unit, parameter.name,
        fmt::format("is on device {}, which cannot be sharded here", tensor.device().str()),
        "move the module to the CPU first; a module on the meta device needs a param_init_fn, "
        "or to_empty() and its own initialisation");
  }
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch() || !tensor.has_storage() ||
      tensor.is_quantized()) {
    return refusal(unit, parameter.name,
                   "is of a tensor class that handles operations itself (__torch_dispatch__, a "
                   "DTensor, a quantized tensor), so its values are not in memory of its own that "
                   "could be divided",
                   "leave it out (ignored_params, ignored_states), or shard before the module is "
                   "converted");
  }
  if (!tensor.is_leaf()) {
    return refusal(unit, parameter.name, "is not a leaf of the graph",
                   "wrap modules that own their parameters, outside of any computation");
  }
  const auto owner = owned.add(tensor, fmt::format("'{}' of unit '{}'", parameter.name, unit));
  if (!owner) return {};
  return refusal(unit, parameter.name,
                 fmt::format("belongs to a sharded unit already: it is {}", *owner),
                 "wrap a module once, and keep modules that share a parameter in one unit");
}

/// The ranks must agree before they share memory; what one cannot wrap, all refuse.
void check_alike(const std::string& name, const NamedTensors& parameters,
                 const ShardOptions& options, std::string problem) {
  const std::string what = fmt::format("sharded unit '{}'", name);
  const auto lines = describe_model(parameters, {}, "");
  for (const Group& group : {options.shard, options.replicate}) {
    if (!group) continue;
    try {
      check_model(*group, what, lines, problem);
    } catch (const ArgumentError& error) {
      problem = error.what();  // the ranks of the other group wait for this one
    }
  }
  if (!problem.empty()) throw ArgumentError(problem);
}

}  // namespace

ParamGroup::ParamGroup(std::string name, const NamedTensors& parameters, ShardOptions options)
    : name_(std::move(name)), options_(std::move(options)) {
  std::map<std::tuple<bool, at::ScalarType>, NamedTensors> kinds;
  std::string problem;
  for (const NamedTensor& parameter : parameters) {
    if (problem.empty()) problem = problem_of(name_, parameter, owned_);
    const at::Tensor& tensor = parameter.tensor;
    kinds[{!tensor.requires_grad(), tensor.scalar_type()}].push_back(parameter);
  }
  check_alike(name_, parameters, options_, std::move(problem));
  const auto pool = BufferPool::of(options_.shard);
  for (auto& [kind, members] : kinds) {
    const std::size_t flat = flats_.size();
    flats_.push_back(std::make_unique<FlatParameter>(
        fmt::format("unit '{}'", name_), std::move(members), options_, pool,
        [this, flat](std::size_t index) { accumulate_guarded(flat, index); }));
  }
}

void ParamGroup::set_place(std::size_t place) {
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    const std::string array = i == 0 ? "" : fmt::format(".{}", i);
    // The name comes last: labels are cut.
    flats_[i]->set_place((static_cast<std::uint64_t>(place) << 16) + i,
                         fmt::format("unit {}{} '{}'", place, array, name_));
  }
}

void ParamGroup::take_written() {
  for (const auto& flat : flats_) flat->take_written();
}

void ParamGroup::publish() {
  for (const auto& flat : flats_) flat->memory().publish();
}

bool ParamGroup::needs_barrier() const {
  for (const auto& flat : flats_) {
    if (flat->memory().needs_barrier()) return true;
  }
  return false;
}

void ParamGroup::begin_unshard() {
  for (const auto& flat : flats_) flat->memory().begin_unshard();
}

void ParamGroup::unshard() {
  begin_unshard();
  for (const auto& flat : flats_) flat->unshard();
  tell_who_shows(/*whole=*/true);
}

void ParamGroup::tell_who_shows(bool whole) {
  if (std::exchange(is_whole_, whole) != whole && on_show_) on_show_(*this, whole);
}

void ParamGroup::hold() {
  unshard();
  is_held_ = true;
}

void ParamGroup::divide_gradients_by(std::optional<double> divisor) {
  for (const auto& flat : flats_) flat->divide_gradients_by(divisor);
}

void ParamGroup::zero_unused(bool zeroes) {
  for (const auto& flat : flats_) flat->zero_unused(zeroes);
}

void ParamGroup::show_waiting(bool shows) {
  for (const auto& flat : flats_) flat->show_waiting(shows);
}

void ParamGroup::reduce_by(FlatParameter::ReduceHook hook) {
  has_reduce_hook_ = static_cast<bool>(hook);
  for (const auto& flat : flats_) flat->reduce_by(hook);
}

void ParamGroup::reshard(bool frees) {
  is_held_ = false;
  for (const auto& flat : flats_) {
    flat->show_shards();
    if (frees) flat->memory().reshard();
  }
  tell_who_shows(/*whole=*/false);
}

bool ParamGroup::is_unsharded() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->is_unsharded(); });
}

void ParamGroup::begin_pass(bool averages) {
  if (phase_ != Phase::Idle) return;
  phase_ = Phase::Gradients;
  for (const auto& flat : flats_) flat->begin_pass(averages);
}

void ParamGroup::accumulate_gradient(std::size_t flat, std::size_t index) {
  if (phase_ == Phase::Idle) {
    throw StateError(fmt::format(
        "libddp unit '{}': parameter '{}' got a gradient in a backward pass that reached none of "
        "the tensors that the module returned. Hint: return tensors, or tuples, lists, dicts or "
        "dataclasses of them, and use the parameters in their module's forward only.",
        name_, flats_[flat]->parameters()[index].name));
  }
  if (phase_ == Phase::Reducing && on_again_) on_again_(*this);
  if (flats_[flat]->accumulate_gradient(index)) {
    const bool awaits = std::any_of(flats_.begin(), flats_.end(),
                                    [](const auto& other) { return other->awaits_any(); });
    if (!awaits) phase_ = Phase::Complete;
  }
  if (on_gradient_) on_gradient_(*this);
}

void ParamGroup::accumulate_guarded(std::size_t flat, std::size_t index) {
  try {
    accumulate_gradient(flat, index);
  } catch (...) {
    if (on_error_) on_error_(std::current_exception());
    throw;
  }
}

bool ParamGroup::trains_all() const {
  return std::all_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->trains_all(); });
}

bool ParamGroup::wants_average() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->wants_average(); });
}

bool ParamGroup::has_waiting() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->has_waiting(); });
}

void ParamGroup::reduce() {
  phase_ = Phase::Reducing;
  for (const auto& flat : flats_) flat->reduce();
}

void ParamGroup::begin_reduction() {
  phase_ = Phase::Reducing;
  for (const auto& flat : flats_) {
    if (flat->wants_average()) flat->begin_reduction();
  }
}

bool ParamGroup::is_averaged() const {
  return phase_ == Phase::Reducing &&
         std::all_of(flats_.begin(), flats_.end(), [](const auto& flat) {
           return flat->is_averaged() || !flat->wants_average();
         });
}

void ParamGroup::collect() {
  for (const auto& flat : flats_) flat->collect();
}

void ParamGroup::begin_again() {
  for (const auto& flat : flats_) flat->begin_again();
  phase_ = Phase::Gradients;
}

void ParamGroup::install() {
  for (const auto& flat : flats_) flat->install();
  phase_ = Phase::Installed;
}

void ParamGroup::end_pass() {
  if (phase_ != Phase::Idle && phase_ != Phase::Installed) install();
  phase_ = Phase::Idle;
}

void ParamGroup::abandon() {
  for (const auto& flat : flats_) flat->abandon();
  phase_ = Phase::Idle;
}

bool ParamGroup::has_late_hooks() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->has_late_hooks(); });
}

void ParamGroup::run_late_hooks() {
  for (const auto& flat : flats_) flat->run_late_hooks();
}

}  // namespace libddp
