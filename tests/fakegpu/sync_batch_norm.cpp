// The operators of torch.nn.SyncBatchNorm, which the CPU has no kernels of. Statistics are float's
// for half precisions, as CUDA's.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rsqrt.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace fakegpu {
namespace {

using Two = std::tuple<at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

at::Tensor wide(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

/// All but the channels.
std::vector<std::int64_t> other_dims(const at::Tensor& input) {
  std::vector<std::int64_t> dims{0};
  for (std::int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

/// Numbers of the channels, so that they meet the input's.
at::Tensor spread(const at::Tensor& channels, const at::Tensor& input) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
  sizes[1] = channels.numel();
  return wide(channels).view(sizes);
}

Two stats(const at::Tensor& input, double eps) {
  const at::Tensor x = wide(input);
  return {x.mean(other_dims(x)), at::rsqrt(x.var(other_dims(x), false) + eps)};
}

at::Tensor normalize(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                     const at::Tensor& mean, const at::Tensor& invstd, double) {
  at::Tensor y = (wide(input) - spread(mean, input)) * spread(invstd, input);
  if (weight && weight->defined()) y = y * spread(*weight, input);
  if (bias && bias->defined()) y = y + spread(*bias, input);
  return y.to(input.scalar_type());
}

Two gather_stats(const at::Tensor&, const at::Tensor& means, const at::Tensor& invstds,
                 const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
                 double eps, const at::Tensor& counts) {
  const at::Tensor count = wide(counts).view({-1, 1});
  const at::Tensor total = count.sum();
  const at::Tensor mean = (means * count).sum(0) / total;
  const at::Tensor vars = invstds.pow(-2) - eps + (means - mean).pow(2);
  const at::Tensor var = (vars * count).sum(0) / total;
  if (running_mean && running_mean->defined())
    running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (running_var && running_var->defined())
    running_var->mul_(1 - momentum).add_(var * total / (total - 1), momentum);
  return {mean, at::rsqrt(var + eps)};
}

Four backward_reduce(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                     const at::Tensor& invstd, const MaybeTensor&, bool, bool, bool) {
  const at::Tensor centred = wide(input) - spread(mean, input);
  const at::Tensor sum = wide(grad).sum(other_dims(input));
  const at::Tensor sum_centred = (wide(grad) * centred).sum(other_dims(input));
  return {sum, sum_centred, sum_centred * invstd, sum.clone()};
}

at::Tensor backward_normalize(const at::Tensor& grad, const at::Tensor& input,
                              const at::Tensor& mean, const at::Tensor& invstd,
                              const MaybeTensor& weight, const at::Tensor& sum,
                              const at::Tensor& sum_centred, const at::Tensor& counts) {
  const at::Tensor total = counts.sum();
  const at::Tensor centred = wide(input) - spread(mean, input);
  const at::Tensor slope = spread(invstd.pow(2) * sum_centred / total, input);
  at::Tensor result =
      (wide(grad) - spread(sum / total, input) - centred * slope) * spread(invstd, input);
  if (weight && weight->defined()) result = result * spread(*weight, input);
  return result.to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("batch_norm_stats", &stats);
  library.impl("batch_norm_elemt", &normalize);
  library.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  library.impl("batch_norm_backward_reduce", &backward_reduce);
  library.impl("batch_norm_backward_elemt", &backward_normalize);
}

}  // namespace
}  // namespace fakegpu
