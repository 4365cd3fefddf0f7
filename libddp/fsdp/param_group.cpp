#include "libddp/fsdp/param_group.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/autograd/late_hooks.h"
#include "libddp/base/error.h"
#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/module/model_check.h"

namespace libddp {
namespace {

std::string refusal(const std::string& unit, const std::string& parameter, const std::string& what,
                    const std::string& hint) {
  return fmt::format("libddp fsdp: unit '{}': parameter '{}' {}. Hint: {}.", unit, parameter, what,
                     hint);
}

/// Why a parameter cannot be sharded; empty if it can.
std::string problem_of(const std::string& unit, const NamedTensor& parameter, c10::Device device,
                       const ShardOptions& options, OwnedTensors& owned) {
  const at::Tensor& tensor = parameter.tensor;
  if (tensor.device().is_meta() || tensor.layout() != at::kStrided) {
    return refusal(
        unit, parameter.name,
        fmt::format("is on device {}, which cannot be sharded here", tensor.device().str()),
        "move the module to the CPU or a GPU first; a module on the meta device needs a "
        "param_init_fn, or to_empty() and its own initialisation");
  }
  const bool is_offloaded = options.compute_device && tensor.device().is_cpu();
  if (tensor.device() != device && !is_offloaded) {
    return refusal(unit, parameter.name,
                   fmt::format("is on device {}, and the unit's first parameter on {}",
                               tensor.device().str(), device.str()),
                   "move the module to one device, or wrap its parts by themselves");
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

std::string problem_of(const std::string& unit, const ShardOptions& options) {
  if (options.shard && options.shard == options.replicate) {
    return fmt::format(
        "libddp fsdp: unit '{}': shard and replicate are one group. Hint: pass the one that "
        "divides "
        "the parameters as `shard` alone, or two groups that cross.",
        unit);
  }
  for (const auto& [what, dtype] : {std::pair{"param_dtype", options.param_dtype},
                                    std::pair{"reduce_dtype", options.reduce_dtype}}) {
    if (!dtype || c10::isFloatingType(*dtype)) continue;
    return fmt::format(
        "libddp fsdp: unit '{}': {} is {}. Hint: a floating-point type, such as at::kBFloat16.",
        unit, what, c10::toString(*dtype));
  }
  return {};
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

struct ParamGroup::Hooks {
  std::unique_ptr<LateHooks> late;
  std::unique_ptr<AccumulateHooks> accumulate;
};

ParamGroup::ParamGroup(std::string name, const NamedTensors& parameters, ShardOptions options)
    : name_(std::move(name)), options_(std::move(options)) {
  std::map<std::tuple<bool, at::ScalarType, bool>, NamedTensors> kinds;
  std::string problem = problem_of(name_, options_);
  for (const NamedTensor& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    const c10::Device device = FlatSpec::device_of(parameters, options_);
    if (problem.empty()) problem = problem_of(name_, parameter, device, options_, owned_);
    const bool keeps_dtype = options_.keep_dtype.count(parameter.name) > 0;
    kinds[{!tensor.requires_grad(), tensor.scalar_type(), keeps_dtype}].push_back(parameter);
  }
  check_alike(name_, parameters, options_, std::move(problem));
  const auto pool = BufferPool::of(options_.shard, options_.replicate);
  for (auto& [kind, members] : kinds) {
    const std::size_t flat = flats_.size();
    ShardOptions how = options_;
    if (std::get<2>(kind)) how.param_dtype.reset();
    flats_.push_back(std::make_unique<FlatParameter>(fmt::format("unit '{}'", name_),
                                                     std::move(members), how, pool));
    hooks_.push_back(make_hooks(*flats_.back(), flat));
    flats_.back()->show_shards();
  }
}

ParamGroup::~ParamGroup() = default;

void ParamGroup::leave() {
  hooks_.clear();
  for (const auto& flat : flats_) flat->leave();
}

ParamGroup::Hooks ParamGroup::make_hooks(const FlatParameter& parameter, std::size_t flat) {
  if (!parameter.spec().can_require_grad()) return {};
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameter.parameters()) tensors.push_back(tensor);
  Hooks hooks;
  hooks.late = std::make_unique<LateHooks>(tensors);
  hooks.accumulate = std::make_unique<AccumulateHooks>(
      tensors,
      [this, flat, late = hooks.late.get()](std::size_t index, const at::Tensor& /*incoming*/) {
        late->put_back(index);
        handle_gradient(flat, index);
      });
  return hooks;
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

void ParamGroup::finish_copies() {
  for (const auto& flat : flats_) flat->memory().finish_copies();
}

void ParamGroup::begin_unshard() {
  for (const auto& flat : flats_) flat->memory().begin_unshard();
}

bool ParamGroup::unshard() {
  begin_unshard();
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    const FlatSpec& spec = flats_[i]->spec();
    if (!flats_[i]->unshard()) continue;
    // A change of the dtype makes autograd forget the nodes.
    if (hooks_[i].accumulate && spec.compute_dtype != spec.dtype) hooks_[i].accumulate->reinstate();
  }
  const bool begins = values_ == Values::Shards;
  if (begins) values_ = Values::Whole;
  return begins;
}

void ParamGroup::divide_gradients_by(std::optional<double> divisor) {
  for (const auto& flat : flats_) flat->gradient().divide_by(divisor);
}

void ParamGroup::zero_unused(std::optional<bool> zeroes) {
  for (const auto& flat : flats_) flat->gradient().zero_unused(zeroes);
}

void ParamGroup::show_waiting(bool shows) {
  for (const auto& flat : flats_) flat->accumulated().show_waiting(shows);
}

void ParamGroup::reduce_by(const ReduceHook& hook) {
  for (const auto& flat : flats_) flat->gradient().reduce_by(hook);
}

bool ParamGroup::has_reduce_hook() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->gradient().has_reduce_hook(); });
}

bool ParamGroup::reshard(bool frees) {
  for (const auto& flat : flats_) {
    flat->show_shards();
    if (frees) flat->memory().reshard();
  }
  return std::exchange(values_, Values::Shards) != Values::Shards;
}

void ParamGroup::hide_shards(bool hides) {
  for (const auto& flat : flats_) hides ? flat->hide_shards() : flat->end_hiding();
}

void ParamGroup::check_rows_unwritten() {
  for (const auto& flat : flats_) flat->check_rows_unwritten();
}

bool ParamGroup::is_unsharded() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->is_unsharded(); });
}

bool ParamGroup::is_in_memory() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->memory().is_in_memory(); });
}

void ParamGroup::begin_pass(bool averages, bool adds_up) {
  if (state_ != TrainingState::Idle) return;
  state_ = TrainingState::Gradients;
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    const FlatSpec& spec = flats_[i]->spec();
    flats_[i]->gradient().begin_pass(averages);
    if (!hooks_[i].accumulate || !spec.takes_wide_gradients()) continue;
    // As torch: what is averaged at once needs no conversion, and what waits is added up in it.
    const bool waits = !averages && !flats_[i]->accumulated().has_waiting();
    hooks_[i].accumulate->accept(adds_up || waits ? std::optional(spec.reduce_dtype)
                                                  : std::nullopt);
  }
}

void ParamGroup::accumulate(std::size_t flat, std::size_t index) {
  if (state_ == TrainingState::Idle) {
    // Of the whole parameter, which shows a shard.
    at::Tensor parameter = flats_[flat]->parameters()[index].tensor;
    parameter.mutable_grad().reset();
    throw StateError(fmt::format(
        "libddp unit '{}': parameter '{}' got a gradient in a backward pass that reached none of "
        "the tensors that the module returned. Hint: return tensors, or tuples, lists, dicts or "
        "dataclasses of them, use the parameters in their module's forward only, and change no "
        "output in place that is a view (return it from clone()).",
        name_, flats_[flat]->parameters()[index].name));
  }
  flats_[flat]->memory().note_use();
  if (!flats_[flat]->gradient().accumulate(index)) return;
  const bool awaits = std::any_of(flats_.begin(), flats_.end(),
                                  [](const auto& other) { return other->gradient().awaits_any(); });
  if (!awaits) state_ = TrainingState::Complete;
}

void ParamGroup::handle_gradient(std::size_t flat, std::size_t index) {
  try {
    handler_ ? handler_(*this, flat, index) : accumulate(flat, index);
  } catch (...) {
    if (on_error_) on_error_(std::current_exception());
    throw;
  }
}

bool ParamGroup::trains_all() const {
  return std::all_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->gradient().trains_all(); });
}

bool ParamGroup::has_frozen() const {
  return std::any_of(flats_.begin(), flats_.end(), [](const auto& flat) {
    const auto& parameters = flat->spec().parameters;
    return std::any_of(parameters.begin(), parameters.end(),
                       [](const auto& parameter) { return !parameter.tensor.requires_grad(); });
  });
}

bool ParamGroup::wants_average() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->gradient().wants_average(); });
}

bool ParamGroup::has_waiting() const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [](const auto& flat) { return flat->accumulated().has_waiting(); });
}

void ParamGroup::reduce() {
  state_ = TrainingState::Reducing;
  for (const auto& flat : flats_) flat->gradient().reduce();
}

void ParamGroup::begin_reduction() {
  state_ = TrainingState::Reducing;
  for (const auto& flat : flats_) {
    if (flat->gradient().wants_average()) flat->gradient().begin_reduction();
  }
}

bool ParamGroup::is_averaged() const {
  return state_ == TrainingState::Reducing &&
         std::all_of(flats_.begin(), flats_.end(), [](const auto& flat) {
           return flat->gradient().is_averaged() || !flat->gradient().wants_average();
         });
}

void ParamGroup::collect() {
  for (const auto& flat : flats_) flat->gradient().collect();
}

void ParamGroup::begin_again() {
  for (const auto& flat : flats_) flat->gradient().begin_again();
  put_hooks_back();
  state_ = TrainingState::Gradients;
}

void ParamGroup::install() {
  for (const auto& flat : flats_) flat->gradient().install();
  put_hooks_back();
  state_ = TrainingState::Installed;
}

void ParamGroup::end_pass() {
  const bool is_left = state_ != TrainingState::Idle && state_ != TrainingState::Installed;
  if (is_left) install();
  state_ = TrainingState::Idle;
}

void ParamGroup::abandon() {
  put_hooks_back();
  for (const auto& flat : flats_) flat->gradient().abandon();
  state_ = TrainingState::Idle;
}

void ParamGroup::put_hooks_back() {
  for (const Hooks& hooks : hooks_) {
    if (hooks.late) hooks.late->put_all_back();
  }
}

bool ParamGroup::has_late_hooks() const {
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    for (std::size_t k = 0; hooks_[i].late && k < flats_[i]->size(); ++k) {
      if (hooks_[i].late->has(k)) return true;
    }
  }
  return false;
}

void ParamGroup::run_late_hooks() {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    for (std::size_t k = 0; hooks_[i].late && k < flats_[i]->size(); ++k) {
      if (flats_[i]->gradient().take_installed(k) && hooks_[i].late->has(k)) {
        hooks_[i].late->run(k);
      }
    }
  }
}

}  // namespace libddp
