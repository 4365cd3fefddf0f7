#include "libddp/fsdp/flat_parameter.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/fsdp/show_data.h"

namespace libddp {

namespace {

FlatMemory::Spec memory_spec(const FlatSpec& spec) {
  FlatMemory::Spec made{spec.options.shard, spec.layout, spec.dtype,
                        spec.compute_dtype, spec.label,  spec.device};
  if (spec.is_offloaded()) made.home = spec.home_options(spec.dtype);
  return made;
}

bool is_shown(const at::Tensor& parameter, const at::Tensor& shard) {
  return parameter.sizes() == shard.sizes() && parameter.scalar_type() == shard.scalar_type() &&
         parameter.storage().is_alias_of(shard.storage());
}

}  // namespace

FlatParameter::FlatParameter(std::string label, NamedTensors parameters,
                             const ShardOptions& options, const std::shared_ptr<BufferPool>& pool)
    : spec_(std::move(label), std::move(parameters), options),
      memory_(FlatMemory::make(memory_spec(spec_), pool)),
      accumulated_(spec_),
      gradient_(spec_, pool, accumulated_),
      copies_(spec_, *memory_, accumulated_) {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < size(); ++i) {
    whole_.push_back(memory_->whole(i));
    shards_.push_back(memory_->shard(i));
    const at::Tensor& parameter = spec_.parameters[i].tensor;
    shards_[i].reshape(-1).copy_(spec_.shard_in_whole(parameter.detach(), i));
  }
  for (std::size_t i = 0; i < size(); ++i) show_data(spec_.parameters[i].tensor, whole_[i]);
  if (spec_.is_sharded()) counts_.resize(size());
}

void FlatParameter::set_place(std::uint64_t place, std::string label) {
  spec_.place = place;
  spec_.call_label = std::move(label);
  memory_->relabel(spec_.call_label);
}

TrainedSet FlatParameter::trained() const {
  TrainedSet found;
  for (const auto& [name, tensor] : spec_.parameters) found.add(tensor.requires_grad());
  return found;
}

bool FlatParameter::unshard() {
  memory_->unshard();
  if (shows_whole_) return false;
  check_rows_unwritten();
  check_shards();
  if (spec_.has_shards_apart()) accumulated_.put_aside();
  for (std::size_t i = 0; i < size(); ++i) show_data(spec_.parameters[i].tensor, whole_[i]);
  for (std::size_t i = 0; i < counts_.size(); ++i)
    counts_[i].show_whole(spec_.parameters[i].tensor);
  return shows_whole_ = true;
}

void FlatParameter::take_written() {
  if (!shows_shards()) return;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& shown = spec_.parameters[i].tensor;
    const at::Tensor& shard = shards_[i];
    if (shown.const_data_ptr() == shard.const_data_ptr()) continue;
    if (shown.sizes() != shard.sizes() || shown.scalar_type() != spec_.dtype) continue;
    const c10::NoGradGuard no_grad;
    memory_->finish_copies();
    shard.copy_(shown);
    show_data(shown, shard);
  }
}

// What is written elsewhere would be lost without a word.
void FlatParameter::check_shards() const {
  if (!shows_shards()) return;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& shown = spec_.parameters[i].tensor;
    const at::Tensor& shard = shards_[i];
    const bool is_alike = shown.sizes() == shard.sizes() && shown.scalar_type() == spec_.dtype;
    if (is_alike && shown.const_data_ptr() == shard.const_data_ptr()) continue;
    const std::string what =
        is_alike ? "its values were put into other memory between a forward and its backward pass"
                 : fmt::format("it is {} [{}], and was {} [{}]", c10::toString(shown.scalar_type()),
                               fmt::join(shown.sizes(), ", "), c10::toString(spec_.dtype),
                               fmt::join(shard.sizes(), ", "));
    throw StateError(fmt::format(
        "libddp {}: parameter '{}' is not what this rank owns of it any more: {}. Hint: change "
        "dtypes and shapes before wrapping, and values between steps: in place (copy_), or through "
        "summon_full_params.",
        spec_.label, spec_.parameters[i].name, what));
  }
}

bool FlatParameter::refuses_writes() const { return spec_.is_sharded() && spec_.device.is_cpu(); }

void FlatParameter::expect_no_writes() {
  if (refuses_writes()) write_check_.begin(spec_.parameters, whole_);
}

void FlatParameter::check_unwritten() {
  const auto written = write_check_.find_written(spec_.parameters, whole_);
  if (!written) return;
  throw ArgumentError(fmt::format(
      "libddp {}: the forward has written into parameter '{}'. The ranks of a host share its "
      "values while it is whole, and elsewhere what is written is lost. Hint: write between "
      "steps, when it shows this rank's part; or leave it out (ignored_params, ignored_states).",
      spec_.label, spec_.parameters[*written].name));
}

void FlatParameter::show_shards() {
  if (!shows_whole_) return;
  for (std::size_t i = 0; i < size(); ++i) show_data(spec_.parameters[i].tensor, shards_[i]);
  for (std::size_t i = 0; i < counts_.size(); ++i)
    counts_[i].show_shard(spec_.parameters[i].tensor);
  shows_whole_ = false;
  if (!gradient_.is_in_pass()) accumulated_.give_back();
}

// Elements that a script changes one by one are where it looks for them, and a product of matrices
// fails: a vector could fit into one where it has as many elements as the matrix has rows or
// columns.
FlatLayout::Shape FlatParameter::hidden_shape(std::size_t index) const {
  const FlatLayout::Shape& whole = spec_.layout.shape(index);
  const std::int64_t numel = shards_[index].numel();
  const bool could_fit = std::find(whole.begin(), whole.end(), numel) != whole.end();
  if (whole.size() > 1 && could_fit) return {numel, 1, 1};
  return {numel};
}

void FlatParameter::hide_shards() {
  if (are_hidden_ || !shows_shards() || !spec_.is_sharded()) return;
  if (refuses_writes()) row_check_.begin(spec_.parameters, shards_);
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& shown = spec_.parameters[i].tensor;
    if (!is_shown(shown, shards_[i])) continue;
    shown.unsafeGetTensorImpl()->set_sizes_contiguous(hidden_shape(i));
  }
  are_hidden_ = true;
}

void FlatParameter::end_hiding() {
  if (!std::exchange(are_hidden_, false)) return;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& shown = spec_.parameters[i].tensor;
    // What somebody has put there meanwhile is found by check_shards.
    const bool is_hidden = shown.sizes() == at::IntArrayRef(hidden_shape(i));
    if (is_hidden && shown.storage().is_alias_of(shards_[i].storage())) {
      show_data(shown, shards_[i]);
    }
  }
}

void FlatParameter::check_rows_unwritten() {
  if (!are_hidden_) return;
  end_hiding();
  const auto written = row_check_.find_written(spec_.parameters, shards_);
  if (!written) return;
  throw ArgumentError(fmt::format(
      "libddp {}: the forward has written into parameter '{}' while its unit did not run. Other "
      "ranks of the host may read it before, or behind that. Hint: write between steps.",
      spec_.label, spec_.parameters[*written].name));
}

void FlatParameter::leave() {
  end_hiding();
  const c10::NoGradGuard no_grad;
  const double undefined =
      spec_.can_require_grad() ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  const at::TensorOptions options = spec_.home_options(spec_.dtype).pinned_memory(false);
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& parameter = spec_.parameters[i].tensor;
    parameter.mutable_grad() = at::Tensor();
    show_data(parameter, at::full(spec_.layout.shape(i), undefined, options));
  }
}

}  // namespace libddp
