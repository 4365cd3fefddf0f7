#include "libddp/activation/selective_store.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <fmt/format.h>

#include <algorithm>

#include "libddp/activation/checkpoint_error.h"
#include "libddp/autograd/version_of.h"

namespace libddp {
namespace {

/// The same data for another graph: autograd writes the history of a result into the tensor itself.
c10::IValue without_history(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? tensor.tensor_data() : tensor;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.tensor_data());
    return list;
  }
  return value;
}

std::int64_t version_of_value(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? version_of(value.toTensor()) : 0;
}

std::string text_of(const c10::OperatorHandle& op) { return c10::toString(op.operator_name()); }

bool returns_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& value) { return value.alias_info() != nullptr; });
}

bool share_version(const at::Tensor& one, const at::Tensor& other) {
  const std::int64_t version = version_of(one);
  if (version_of(other) != version) return false;
  one.unsafeGetTensorImpl()->bump_version();
  const bool does_share = version_of(other) != version;
  c10::VariableVersion counter = one.unsafeGetTensorImpl()->version_counter();
  counter.set_version(version);
  return does_share;
}

/// What changes its first argument in place inside of others, and activations that may.
constexpr std::pair<const char*, const char*> kWriters[] = {
    {"add_", "Tensor"},      {"add_", "Scalar"}, {"sub_", "Tensor"},  {"mul_", "Tensor"},
    {"mul_", "Scalar"},      {"div_", "Tensor"}, {"div_", "Scalar"},  {"addcmul_", ""},
    {"addmm_", ""},          {"baddbmm_", ""},   {"sigmoid_", ""},    {"tanh_", ""},
    {"relu_", ""},           {"silu_", ""},      {"gelu_", ""},       {"leaky_relu_", ""},
    {"hardtanh_", ""},       {"elu_", ""},       {"clamp_", ""},      {"clamp_min_", ""},
    {"threshold_", ""},      {"neg_", ""},       {"exp_", ""},        {"masked_fill_", "Scalar"},
    {"bernoulli_", "float"}, {"copy_", ""},      {"fill_", "Scalar"}, {"zero_", ""},
};

bool is_writer(const c10::OperatorHandle& op) { return op.schema().is_mutable(); }

at::Tensor first_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  return stack[stack.size() - count].toTensor();
}

/// Once: each forward of a block names its operators.
void choose_writers() {
  [[maybe_unused]] static const bool are_chosen = [] {
    for (const auto& [name, overload] : kWriters) {
      const auto found =
          c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, overload});
      if (found) OpInterceptor::choose(*found);
    }
    return true;
  }();
}

}  // namespace

OperatorSet operators_named(const std::vector<std::pair<std::string, std::string>>& names) {
  OperatorSet operators;
  choose_writers();
  for (const auto& [name, overload] : names) {
    const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!found) {
      throw ArgumentError(
          fmt::format("libddp: selective checkpointing: there is no operator {}.{}. Hint: name an "
                      "overload, such "
                      "as torch.ops.aten.mm.default.",
                      name, overload));
    }
    if (found->schema().is_mutable()) {
      throw ArgumentError(fmt::format(
          "libddp: selective checkpointing: {} changes its arguments, so its result cannot be "
          "kept. Hint: leave it out of the list; it runs again then.",
          text_of(*found)));
    }
    // A view is of its argument, which is there again in the replay, and costs nothing to make.
    if (returns_view(found->schema())) continue;
    OpInterceptor::choose(*found);
    operators.insert(*found);
  }
  return operators;
}

void SelectiveStore::note_random(Entry& entry) {
  std::vector<c10::Device> devices;
  for (const auto& [value, version] : entry.results) {
    if (value.isTensor() && value.toTensor().defined()) {
      add_random_device(devices, value.toTensor().device());
    }
  }
  entry.random = std::make_unique<RandomState>(RandomState::now(devices));
}

void SelectiveStore::save(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::size_t count = op.schema().returns().size();
  Entry& entry = entries_.emplace_back(Entry{op, {}, nullptr});
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) {
    c10::IValue value = without_history(stack[i]);
    const std::int64_t version = version_of_value(value);
    entry.results.push_back({std::move(value), version});
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) note_random(entry);
}

void SelectiveStore::hand_out(std::size_t index, const c10::OperatorHandle& op,
                              torch::jit::Stack& stack) const {
  if (index >= entries_.size() || !(entries_[index].op == op)) {
    throw CheckpointError(
        fmt::format("libddp checkpoint: selective recomputation reached {} where the forward pass "
                    "had {}. Hint: "
                    "the block must do the same each time it runs.",
                    text_of(op), index < entries_.size() ? text_of(entries_[index].op) : "ended"));
  }
  const Entry& entry = entries_[index];
  stack.resize(stack.size() - op.schema().arguments().size());
  for (std::size_t i = 0; i < entry.results.size(); ++i) {
    const auto& [value, version] = entry.results[i];
    if (!allow_mutation_ && version_of_value(value) != version) {
      throw CheckpointError(fmt::format(
          "libddp checkpoint: result {} of {} was kept by selective checkpointing and has been "
          "modified by an inplace operation since. Hint: clone it first, or pass "
          "allow_cache_entry_mutation=True.",
          i, text_of(op)));
    }
    stack.push_back(without_history(value));
  }
  if (entry.random) entry.random->restore();
}

void SelectiveStore::protect_from(const at::Tensor& target) {
  if (allow_mutation_ || !target.defined() || !target.has_storage()) return;
  for (Entry& entry : entries_) {
    for (Result& result : entry.results) {
      if (result.value.isTensor()) protect_from(target, result);
    }
  }
}

void SelectiveStore::protect_from(const at::Tensor& target, Result& result) const {
  const at::Tensor& kept = result.value.toTensor();
  if (!kept.defined() || !kept.has_storage() || !kept.is_alias_of(target)) return;
  if (version_of(kept) != result.version || share_version(target, kept)) return;
  const at::AutoDispatchBelowADInplaceOrView plain;
  const at::Tensor copy = kept.clone();
  result = {copy, version_of(copy)};
}

void SavingRun::on_op(const Op& op, torch::jit::Stack* stack) {
  if (is_writer(op.handle)) store_->protect_from(first_argument(op.handle, *stack));
  run(op, stack);
  if (store_->keeps(op.handle)) store_->save(op.handle, *stack);
}

void ReplayRun::on_op(const Op& op, torch::jit::Stack* stack) {
  if (store_->keeps(op.handle)) {
    store_->hand_out(next_++, op.handle, *stack);
  } else {
    if (is_writer(op.handle)) store_->protect_from(first_argument(op.handle, *stack));
    run(op, stack);
  }
}

}  // namespace libddp
