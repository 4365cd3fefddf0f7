#include "libddp/ddp/sparse_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/group_identity.h"
#include "libddp/group/sparse_all_reduce.h"

namespace libddp {
namespace {

constexpr std::uint8_t kNoGradient = 0;
constexpr std::uint8_t kDenseGradient = 255;

/// One byte: nothing, dense, or the number of sparse dimensions.
std::uint8_t layout_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return kNoGradient;
  if (!gradient.is_sparse()) return kDenseGradient;
  return static_cast<std::uint8_t>(gradient.sparse_dim());
}

}  // namespace

SparseGradients::SparseGradients(const NamedTensors& parameters,
                                 const std::vector<std::string>& names, Group group)
    : group_(std::move(group)), is_sparse_(parameters.size(), false) {
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    const NamedTensor& parameter = parameters[index];
    if (std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    is_sparse_[index] = true;
    indices_.push_back(index);
    parameters_.push_back(parameter);
    dtypes_.push_back(parameter.tensor.scalar_type());
  }
}

void SparseGradients::follow_dtypes() {
  for (std::size_t position = 0; position < parameters_.size(); ++position) {
    dtypes_[position] = parameters_[position].tensor.scalar_type();
  }
}

void SparseGradients::check(std::size_t index) const {
  const auto position = static_cast<std::size_t>(
      std::lower_bound(indices_.begin(), indices_.end(), index) - indices_.begin());
  at::Tensor& gradient = parameter(position).tensor.mutable_grad();
  if (!gradient.defined()) return;
  if (gradient.scalar_type() == also_accepted_) gradient = gradient.to(dtypes_[position]);
  const bool fits = gradient.layout() == at::kSparse || gradient.layout() == at::kStrided;
  if (fits && gradient.device() == parameter(position).tensor.device() &&
      gradient.scalar_type() == dtypes_[position])
    return;
  const GroupIdentity me{group_->name(), group_->rank(), group_->size()};
  throw ArgumentError(fmt::format(
      "{} backward: parameter '{}': its gradient is {} in layout {} on {}, but a sparse COO or "
      "dense one of {} on {} is expected. Hint: wrap the model after changing its dtype or "
      "device.",
      me.where(), parameter(position).name, c10::toString(gradient.scalar_type()),
      c10::str(gradient.layout()), gradient.device().str(), c10::toString(dtypes_[position]),
      parameter(position).tensor.device().str()));
}

bool SparseGradients::average(const std::vector<Share>& shares, double scale) {
  if (indices_.empty()) return false;
  const c10::NoGradGuard no_grad;
  const std::vector<Agreed> agreed = agree(shares);
  std::vector<std::size_t> positions;
  std::vector<at::Tensor> contributions;
  for (std::size_t position = 0; position < indices_.size(); ++position) {
    if (!agreed[position].is_used) continue;
    const at::Tensor own = contribution(position, agreed[position], shares[position]);
    if (agreed[position].is_dense) {
      average_dense(position, own, scale);
    } else {
      positions.push_back(position);
      contributions.push_back(own);
    }
  }
  average_sparse(positions, contributions, scale);
  return is_missing(agreed);
}

bool SparseGradients::exchange(const std::vector<Share>& shares, const Exchange& exchange_one) {
  if (indices_.empty()) return false;
  const c10::NoGradGuard no_grad;
  const std::vector<Agreed> agreed = agree(shares);
  for (std::size_t position = 0; position < indices_.size(); ++position) {
    at::Tensor own = contribution(position, agreed[position], shares[position]);
    // The exchange may write into it, and `.grad` must not change before it has succeeded.
    if (own.is_sparse()) own = own.is_coalesced() ? own.clone() : own.coalesce();
    at::Tensor result = exchange_one(position, own, parameter(position));
    if (agreed[position].is_used) install(position, std::move(result));
  }
  return is_missing(agreed);
}

bool SparseGradients::is_missing(const std::vector<Agreed>& agreed) {
  return std::any_of(agreed.begin(), agreed.end(), [](const Agreed& a) { return a.is_missing; });
}

std::vector<SparseGradients::Agreed> SparseGradients::agree(const std::vector<Share>& shares) {
  const std::size_t row = 2 * indices_.size();
  at::Tensor mine = at::empty({static_cast<std::int64_t>(row)}, at::kByte);
  auto* const own = mine.mutable_data_ptr<std::uint8_t>();
  for (std::size_t position = 0; position < indices_.size(); ++position) {
    own[2 * position] = static_cast<std::uint8_t>(shares[position]);
    own[2 * position + 1] = layout_of(parameter(position).tensor.grad());
  }
  at::Tensor all = at::empty({group_->size() * mine.numel()}, at::kByte);
  group_->all_gather_into(all, mine,
                          {.async = false, .timeout = {}, .label = "kinds of sparse gradients"});
  std::vector<Agreed> agreed(indices_.size());
  const auto* next = all.const_data_ptr<std::uint8_t>();
  for (int rank = 0; rank < group_->size(); ++rank) {
    for (Agreed& known : agreed) {
      const auto share = static_cast<Share>(*next++);
      const std::uint8_t layout = *next++;
      known.is_missing |= share == Share::Missing;
      known.is_used |= share == Share::Used;
      // A rank without data may still show the average of the pass before.
      if (share == Share::Absent || layout == kNoGradient) continue;
      known.is_dense |= layout == kDenseGradient;
      if (layout != kDenseGradient) known.sparse_dim = std::max(known.sparse_dim, layout);
    }
  }
  return agreed;
}

// Whatever stands in `.grad` of a parameter in use counts: shares of passes before that did not
// synchronise, or of steps before.
at::Tensor SparseGradients::contribution(std::size_t position, const Agreed& agreed,
                                         Share share) const {
  const at::Tensor& gradient = parameter(position).tensor.grad();
  const bool has_gradient = gradient.defined() && share != Share::Absent && agreed.is_used;
  const at::Tensor& like = parameter(position).tensor;
  if (!agreed.is_dense) {
    return has_gradient ? gradient : sparse_zeros(like, agreed.sparse_dim);
  }
  if (!has_gradient) return at::zeros(like.sizes(), like.options().dtype(dtypes_[position]));
  return gradient.is_sparse() ? gradient.to_dense() : gradient.clone(at::MemoryFormat::Contiguous);
}

void SparseGradients::average_sparse(const std::vector<std::size_t>& positions,
                                     const std::vector<at::Tensor>& contributions, double scale) {
  std::vector<at::Tensor> averages =
      sparse_sums(*group_, contributions, scale / group_->size(),
                  {.async = false, .timeout = {}, .label = "sparse gradients"});
  for (std::size_t i = 0; i < positions.size(); ++i) install(positions[i], std::move(averages[i]));
}

void SparseGradients::average_dense(std::size_t position, const at::Tensor& contribution,
                                    double scale) {
  group_->all_reduce(contribution, {.op = ReduceOp::Avg, .scale = scale},
                     {.async = false, .timeout = {}, .label = parameter(position).name});
  install(position, contribution);
}

void SparseGradients::install(std::size_t position, at::Tensor gradient) {
  at::Tensor parameter_of_user = parameter(position).tensor;
  parameter_of_user.mutable_grad() = std::move(gradient);
}

}  // namespace libddp
