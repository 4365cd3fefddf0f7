#include "libddp/group/validation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

namespace libddp {

void check_rank(const CallSite& site, const char* argument, int rank) {
  if (rank >= 0 && rank < site.group.world_size) return;
  site.refuse(fmt::format("{}={} is not a rank of this group", argument, rank),
              fmt::format("ranks are 0 to {}", site.group.world_size - 1));
}

void check_peer(const CallSite& site, const char* argument, int rank) {
  check_rank(site, argument, rank);
  if (rank != site.group.rank) return;
  site.refuse(fmt::format("{}={} is this rank itself", argument, rank),
              "copy the tensor, or put both sides into one exchange (batch_isend_irecv)");
}

void check_tag(const CallSite& site, int tag) {
  if (tag >= 0) return;
  site.refuse(fmt::format("tag={} is negative", tag), "tags are 0 and up");
}

void check_reduction(const CallSite& site, const at::Tensor& tensor, ReduceOp op, double scale) {
  const at::ScalarType type = tensor.scalar_type();
  const bool is_floating = c10::isFloatingType(type);
  const bool is_complex = c10::isComplexType(type);
  switch (op) {
    case ReduceOp::Sum:
      break;
    case ReduceOp::Avg:
      if (is_floating || is_complex) break;
      site.refuse(fmt::format("op AVG is not defined for {}", describe("tensor", tensor)),
                  "use SUM and divide, or a floating point dtype");
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Max:
      if (!is_complex) break;
      site.refuse(fmt::format("op {} is not defined for {}", name(op), describe("tensor", tensor)),
                  "complex tensors take SUM and AVG");
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      if (!is_floating && !is_complex) break;
      site.refuse(fmt::format("op {} is not defined for {}", name(op), describe("tensor", tensor)),
                  "bitwise ops take integers and bool");
  }
  if (scale != 1.0 && !is_floating && !is_complex) {
    site.refuse(fmt::format("scale={} is not defined for {}", scale, describe("tensor", tensor)),
                "only floating point results can be scaled");
  }
}

void check_same_dtype(const CallSite& site, const char* argument, const at::Tensor& tensor,
                      const char* other_argument, const at::Tensor& other) {
  if (tensor.scalar_type() == other.scalar_type()) return;
  site.refuse(fmt::format("{} and {} differ in dtype", describe(argument, tensor),
                          describe(other_argument, other)),
              "all tensors of one call must have one dtype");
}

void check_same_numel(const CallSite& site, const char* argument, const at::Tensor& tensor,
                      const char* other_argument, const at::Tensor& other) {
  if (tensor.numel() == other.numel()) return;
  site.refuse(fmt::format("{} and {} differ in size", describe(argument, tensor),
                          describe(other_argument, other)),
              "they must hold the same number of elements");
}

void check_like(const CallSite& site, const char* list, const std::vector<at::Tensor>& tensors,
                const char* argument, const at::Tensor& tensor) {
  for (const at::Tensor& entry : tensors) {
    check_same_dtype(site, list, entry, argument, tensor);
    check_same_numel(site, list, entry, argument, tensor);
  }
}

void check_sizes(const CallSite& site, at::IntArrayRef sizes) {
  const bool is_valid =
      std::all_of(sizes.begin(), sizes.end(), [](auto size) { return size >= 0; });
  if (is_valid) return;
  site.refuse(fmt::format("size [{}] has a negative number", fmt::join(sizes, ", ")),
              "sizes are 0 and up");
}

void check_blocks(const CallSite& site, const char* whole_argument, const at::Tensor& whole,
                  const char* part_argument, const at::Tensor& part) {
  check_same_dtype(site, whole_argument, whole, part_argument, part);
  if (whole.numel() == part.numel() * site.group.world_size) return;
  site.refuse(fmt::format("{} must hold {} blocks of {}, that is {} elements, but holds {}",
                          describe(whole_argument, whole), site.group.world_size,
                          describe(part_argument, part), part.numel() * site.group.world_size,
                          whole.numel()),
              fmt::format("{} is [world_size * d0, ...] or [world_size, d0, ...] for {} [d0, ...]",
                          whole_argument, part_argument));
}

void check_overlap(const CallSite& site, const char* whole_argument, const at::Tensor& whole,
                   const char* part_argument, const at::Tensor& part) {
  const auto* whole_begin = static_cast<const std::byte*>(whole.const_data_ptr());
  const auto* part_begin = static_cast<const std::byte*>(part.const_data_ptr());
  const std::size_t part_bytes = part.nbytes();
  if (part_bytes == 0 || part_begin + part_bytes <= whole_begin ||
      whole_begin + whole.nbytes() <= part_begin) {
    return;
  }
  if (part_begin == whole_begin + part_bytes * static_cast<std::size_t>(site.group.rank)) return;
  site.refuse(fmt::format("{} overlaps {} elsewhere than in the block of this rank",
                          describe(part_argument, part), describe(whole_argument, whole)),
              "pass separate memory, or exactly this rank's block");
}

void check_list(const CallSite& site, const char* argument, const std::vector<at::Tensor>& list) {
  if (static_cast<int>(list.size()) == site.group.world_size) return;
  site.refuse(fmt::format("{} holds {} tensors, but the group has {} ranks", argument, list.size(),
                          site.group.world_size),
              "pass one tensor per rank");
}

void check_empty_list(const CallSite& site, const char* argument,
                      const std::vector<at::Tensor>& list, int root) {
  if (list.empty()) return;
  site.refuse(fmt::format("{} holds {} tensors on a rank that is not the root (rank {})", argument,
                          list.size(), root),
              fmt::format("pass {} on the root only", argument));
}

std::vector<std::int64_t> check_splits(const CallSite& site, const char* argument,
                                       const at::Tensor& tensor,
                                       const std::vector<std::int64_t>& splits) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const auto world_size = static_cast<std::size_t>(site.group.world_size);
  if (splits.empty()) {
    if (rows % site.group.world_size != 0) {
      site.refuse(fmt::format("{} does not split evenly over {} ranks", describe(argument, tensor),
                              site.group.world_size),
                  "pass split sizes");
    }
    return std::vector<std::int64_t>(world_size, rows / site.group.world_size);
  }
  const bool has_negative =
      std::any_of(splits.begin(), splits.end(), [](std::int64_t split) { return split < 0; });
  if (splits.size() != world_size || has_negative ||
      std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) != rows) {
    site.refuse(fmt::format("split sizes [{}] do not fit {} and {} ranks", fmt::join(splits, ", "),
                            describe(argument, tensor), world_size),
                "pass one size of 0 or more per rank that add up to dim 0");
  }
  return splits;
}

std::chrono::milliseconds check_timeout(const CallSite& site,
                                        std::optional<std::chrono::milliseconds> timeout,
                                        std::chrono::milliseconds default_timeout) {
  if (!timeout) return default_timeout;
  if (timeout->count() > 0) return *timeout;
  site.refuse(fmt::format("timeout of {} ms", timeout->count()), "pass a time greater than zero");
}

}  // namespace libddp
