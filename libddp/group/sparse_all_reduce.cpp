#include "libddp/group/sparse_all_reduce.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <utility>

#include "libddp/base/group_identity.h"

namespace libddp {

/// What the others must know of a tensor before its entries come: their number, and the type.
struct SparseLayout {
  std::int64_t num_entries = 0;
  /// dtype, sparse dimensions, sizes: equal on all ranks.
  std::vector<std::int64_t> type;

  explicit SparseLayout(const at::Tensor& tensor)
      : num_entries(tensor._nnz()),
        type{static_cast<std::int64_t>(tensor.scalar_type()), tensor.sparse_dim()} {
    type.insert(type.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  SparseLayout(const std::int64_t* numbers, std::size_t type_length)
      : num_entries(*numbers), type(numbers + 1, numbers + 1 + type_length) {}

  at::ScalarType dtype() const { return static_cast<at::ScalarType>(type[0]); }
  std::int64_t sparse_dim() const { return type[1]; }
  std::vector<std::int64_t> sizes() const { return {type.begin() + 2, type.end()}; }
  /// [entries, dense sizes].
  std::vector<std::int64_t> values_sizes() const {
    std::vector<std::int64_t> result = {num_entries};
    result.insert(result.end(), type.begin() + 2 + sparse_dim(), type.end());
    return result;
  }
  std::string text() const {
    return fmt::format("{} [{}] with {} sparse", c10::toString(dtype()), fmt::join(sizes(), ", "),
                       sparse_dim());
  }
};

namespace {

using Sizes = std::vector<std::int64_t>;

at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

at::Tensor coo(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes) {
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes, {}, /*is_coalesced=*/true);
}

/// Entries sorted and unique, in memory that can be sent.
at::Tensor coalesced(const at::Tensor& input) {
  const at::ScalarType dtype = input.scalar_type();
  const at::Tensor result =
      input.is_coalesced() ? input : input.to(accumulation_dtype(dtype)).coalesce();
  return coo(result._indices().contiguous(), result._values().to(dtype).contiguous(),
             input.sizes());
}

at::Tensor on(c10::Device device, const at::Tensor& sparse) {
  if (sparse.device() == device) return sparse;
  return coo(sparse._indices().to(device), sparse._values().to(device), sparse.sizes());
}

using Layouts = std::vector<SparseLayout>;

at::Tensor numbers_of(const Layouts& layouts) {
  Sizes numbers;
  for (const SparseLayout& layout : layouts) {
    numbers.push_back(layout.num_entries);
    numbers.insert(numbers.end(), layout.type.begin(), layout.type.end());
  }
  at::Tensor result = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  std::memcpy(result.data_ptr(), numbers.data(), result.nbytes());
  return result;
}

at::Tensor space_for_all(const at::Tensor& numbers, int num_ranks) {
  return at::empty({num_ranks * numbers.numel()}, at::kLong);
}

/// Every rank's layouts from their numbers. Tensors of another number of dimensions make the
/// message longer, which the group itself names.
std::vector<Layouts> layouts_of(const at::Tensor& all_numbers, const Layouts& own, int num_ranks) {
  const auto* next = all_numbers.const_data_ptr<std::int64_t>();
  std::vector<Layouts> layouts(static_cast<std::size_t>(num_ranks));
  for (Layouts& of_rank : layouts) {
    for (const SparseLayout& layout : own) {
      of_rank.emplace_back(next, layout.type.size());
      next += 1 + layout.type.size();
    }
  }
  return layouts;
}

void check_types(const ProcessGroup& group, const std::vector<Layouts>& layouts) {
  for (int rank = 1; rank < group.size(); ++rank) {
    for (std::size_t i = 0; i < layouts[0].size(); ++i) {
      const SparseLayout& first = layouts[0][i];
      const SparseLayout& other = layouts[rank][i];
      if (other.type == first.type) continue;
      const GroupIdentity me{group.name(), group.rank(), group.size()};
      throw PeerError(
          fmt::format("{} all_reduce sparse: sparse dimensions do not match: rank 0 has {}, rank "
                      "{} has {}. Hint: pass tensors of one dtype and shape on every rank.",
                      me.where(), first.text(), rank, other.text()),
          rank);
    }
  }
}

at::Tensor empty_indices(const SparseLayout& layout) {
  return at::empty({layout.sparse_dim(), layout.num_entries}, at::kLong);
}

at::Tensor empty_values(const SparseLayout& layout) {
  return at::empty(layout.values_sizes(), layout.dtype());
}

std::int64_t num_bytes(const Layouts& layouts) {
  std::int64_t bytes = 0;
  for (const SparseLayout& layout : layouts) {
    std::int64_t numel = 1;
    for (const std::int64_t size : layout.values_sizes()) numel *= size;
    bytes += layout.sparse_dim() * layout.num_entries * static_cast<std::int64_t>(sizeof(int64_t));
    bytes += numel * static_cast<std::int64_t>(c10::elementSize(layout.dtype()));
  }
  return bytes;
}

/// Indices and values of all tensors, one behind the other.
at::Tensor pack(const std::vector<at::Tensor>& tensors, const Layouts& layouts) {
  at::Tensor bytes = at::empty({num_bytes(layouts)}, at::kByte);
  auto* next = static_cast<std::byte*>(bytes.data_ptr());
  const auto append = [&next](const at::Tensor& part) {
    if (part.nbytes() > 0) std::memcpy(next, part.const_data_ptr(), part.nbytes());
    next += part.nbytes();
  };
  for (const at::Tensor& tensor : tensors) {
    append(tensor._indices());
    append(tensor._values());
  }
  return bytes;
}

std::vector<at::Tensor> unpack(const at::Tensor& bytes, const Layouts& layouts) {
  const auto* next = static_cast<const std::byte*>(bytes.const_data_ptr());
  const auto take = [&next](at::Tensor part) {
    if (part.nbytes() > 0) std::memcpy(part.data_ptr(), next, part.nbytes());
    next += part.nbytes();
    return part;
  };
  std::vector<at::Tensor> tensors;
  for (const SparseLayout& layout : layouts) {
    const at::Tensor indices = take(empty_indices(layout));
    const at::Tensor values = take(empty_values(layout));
    tensors.push_back(coo(indices, values, layout.sizes()));
  }
  return tensors;
}

std::vector<at::Tensor> gather_bytes(ProcessGroup& group, const at::Tensor& mine,
                                     const std::vector<Layouts>& layouts,
                                     const CallOptions& options) {
  std::vector<at::Tensor> parts;
  std::int64_t total = 0;
  for (const Layouts& of_rank : layouts) {
    parts.push_back(at::empty({num_bytes(of_rank)}, at::kByte));
    total += parts.back().numel();
  }
  if (total > 0) group.all_gather(parts, mine, options);
  return parts;
}

/// `tensors`: one per rank. Entries of two sorted tensors are merged, not sorted again.
at::Tensor add_up(const std::vector<at::Tensor>& tensors, double scale) {
  const at::ScalarType dtype = tensors[0].scalar_type();
  const at::ScalarType wide = accumulation_dtype(dtype);
  at::Tensor sum = tensors[0].to(wide);
  for (std::size_t rank = 1; rank < tensors.size(); ++rank) sum = sum.add(tensors[rank].to(wide));
  sum = sum.coalesce();
  at::Tensor values = sum._values();
  if (scale != 1.0) values = values.mul(scale);
  return coo(sum._indices(), values.to(dtype), sum.sizes());
}

}  // namespace

std::vector<at::Tensor> sparse_sums(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                                    double scale, CallOptions options) {
  if (tensors.empty()) return {};
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> own;
  Layouts own_layouts;
  for (const at::Tensor& tensor : tensors) {
    own.push_back(on(c10::kCPU, coalesced(tensor)));
    own_layouts.emplace_back(own.back());
  }
  const at::Tensor numbers = numbers_of(own_layouts);
  const at::Tensor all_numbers = space_for_all(numbers, group.size());
  group.all_gather_into(all_numbers, numbers, options);
  const std::vector<Layouts> layouts = layouts_of(all_numbers, own_layouts, group.size());
  check_types(group, layouts);
  const std::vector<at::Tensor> bytes =
      gather_bytes(group, pack(own, own_layouts), layouts, options);

  std::vector<std::vector<at::Tensor>> shares(tensors.size());
  for (std::size_t rank = 0; rank < layouts.size(); ++rank) {
    const std::vector<at::Tensor> of_rank = unpack(bytes[rank], layouts[rank]);
    for (std::size_t i = 0; i < of_rank.size(); ++i) shares[i].push_back(of_rank[i]);
  }
  std::vector<at::Tensor> sums;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    sums.push_back(on(tensors[i].device(), add_up(shares[i], scale)));
  }
  return sums;
}

void sparse_all_reduce(ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                       CallOptions options) {
  at::Tensor input = tensors[0];
  for (std::size_t i = 1; i < tensors.size(); ++i) input = input.add(tensors[i]);
  const at::Tensor sum = sparse_sums(group, {input}, 1.0, options).front();
  for (const at::Tensor& tensor : tensors) tensor.copy_(sum);
}

struct SparseSum::State {
  Group group;
  at::Tensor own;
  Layouts own_layout;
  at::Tensor numbers;
  at::Tensor all_numbers;
  /// After the first stage, one per rank: sizes of the messages, and the entries themselves.
  std::vector<Layouts> layouts;
  std::vector<at::Tensor> bytes;
};

SparseSum::SparseSum(Group group, const at::Tensor& tensor) : state_(std::make_unique<State>()) {
  const c10::NoGradGuard no_grad;
  state_->own = coalesced(tensor);
  state_->own_layout = {SparseLayout(state_->own)};
  state_->numbers = numbers_of(state_->own_layout);
  state_->all_numbers = space_for_all(state_->numbers, group->size());
  state_->group = std::move(group);
}

SparseSum::~SparseSum() = default;

WorkPtr SparseSum::gather_layouts(const CallOptions& options) {
  return state_->group->all_gather_into(state_->all_numbers, state_->numbers, options);
}

std::vector<Exchange> SparseSum::messages() {
  State& state = *state_;
  const int own_rank = state.group->rank();
  state.layouts = layouts_of(state.all_numbers, state.own_layout, state.group->size());
  check_types(*state.group, state.layouts);
  const at::Tensor mine = pack({state.own}, state.own_layout);
  std::vector<Exchange> parts;
  for (int rank = 0; rank < state.group->size(); ++rank) {
    if (rank == own_rank) {
      state.bytes.push_back(mine);
      continue;
    }
    state.bytes.push_back(at::empty({num_bytes(state.layouts[rank])}, at::kByte));
    if (mine.numel() > 0) parts.push_back({Exchange::Direction::Send, mine, rank, kTag});
    if (state.bytes.back().numel() > 0) {
      parts.push_back({Exchange::Direction::Recv, state.bytes.back(), rank, kTag});
    }
  }
  return parts;
}

at::Tensor SparseSum::add() const {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> shares;
  for (std::size_t rank = 0; rank < state_->layouts.size(); ++rank) {
    shares.push_back(unpack(state_->bytes[rank], state_->layouts[rank]).front());
  }
  return add_up(shares, 1.0);
}

at::Tensor sparse_zeros(const at::Tensor& like, std::int64_t sparse_dim) {
  Sizes values = {0};
  values.insert(values.end(), like.sizes().begin() + sparse_dim, like.sizes().end());
  const auto options = at::TensorOptions().device(like.device());
  return coo(at::empty({sparse_dim, 0}, options.dtype(at::kLong)),
             at::empty(values, options.dtype(like.scalar_type())), like.sizes());
}

}  // namespace libddp
