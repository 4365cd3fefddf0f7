#include "libddp/interop/sparse.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace libddp {
namespace {

using Sizes = std::vector<std::int64_t>;

/// What a rank must know of another's tensor: entries, then the shape.
std::vector<Sizes> gather_layouts(ProcessGroup& group, const at::Tensor& input,
                                  const CallOptions& options) {
  // The number of dimensions first goes in the shape of the message: a difference is then named by
  // the group itself, with both calls.
  Sizes own = {input._nnz(), input.sparse_dim()};
  own.insert(own.end(), input.sizes().begin(), input.sizes().end());
  const at::Tensor mine = at::tensor(own, at::kLong);
  const at::Tensor all = at::empty({group.size(), mine.numel()}, at::kLong);
  group.all_gather_into(all, mine, options);
  std::vector<Sizes> layouts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* row = all.const_data_ptr<std::int64_t>() + rank * mine.numel();
    layouts.emplace_back(row, row + mine.numel());
  }
  return layouts;
}

void check_shapes(const ProcessGroup& group, const std::vector<Sizes>& layouts) {
  const auto shape = [&](int rank) {
    return Sizes(layouts[rank].begin() + 1, layouts[rank].end());
  };
  for (int rank = 1; rank < group.size(); ++rank) {
    if (shape(rank) == shape(0)) continue;
    throw PeerError(
        fmt::format("libddp[group {}, rank {}/{}] all_reduce sparse: sparse dimensions do not "
                    "match: rank 0 has [{}], rank {} has [{}] (sparse dimensions, then sizes)",
                    group.name(), group.rank(), group.size(), fmt::join(shape(0), ", "), rank,
                    fmt::join(shape(rank), ", ")),
        rank);
  }
}

/// Indices as rows of entries, so that ranks' parts differ in dim 0 only.
at::Tensor rows_of_indices(const at::Tensor& input) { return input._indices().t().contiguous(); }

std::vector<at::Tensor> gather_rows(ProcessGroup& group, const at::Tensor& rows,
                                    const std::vector<Sizes>& layouts, const CallOptions& options) {
  std::vector<at::Tensor> parts;
  for (const Sizes& layout : layouts) {
    Sizes shape = rows.sizes().vec();
    shape[0] = layout[0];
    parts.push_back(at::empty(shape, rows.options()));
  }
  group.all_gather(parts, rows, options);
  return parts;
}

}  // namespace

void sparse_all_reduce(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                       CallOptions options) {
  at::Tensor input = tensors[0];
  for (std::size_t i = 1; i < tensors.size(); ++i) input = input.add(tensors[i]);
  input = input.coalesce();

  const std::vector<Sizes> layouts = gather_layouts(group, input, options);
  check_shapes(group, layouts);
  const auto indices = gather_rows(group, rows_of_indices(input), layouts, options);
  const auto values = gather_rows(group, input._values().contiguous(), layouts, options);

  const auto part = [&](int rank) {
    return at::_sparse_coo_tensor_unsafe(indices[rank].t(), values[rank], input.sizes(),
                                         input.options());
  };
  at::Tensor sum = part(0);
  for (int rank = 1; rank < group.size(); ++rank) sum = sum.add(part(rank));
  sum = sum.coalesce();
  for (at::Tensor tensor : tensors) tensor.copy_(sum);
}

}  // namespace libddp
