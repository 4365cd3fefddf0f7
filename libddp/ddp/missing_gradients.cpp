#include "libddp/ddp/missing_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace libddp {

void MissingGradients::tell(const std::vector<std::uint8_t>& is_missing) {
  num_parameters_ = is_missing.size();
  const auto num_bytes = static_cast<std::int64_t>((num_parameters_ + 7) / 8);
  // Of its own each time: the last message may not have been heard.
  own_ = at::zeros({num_bytes}, at::kByte);
  all_ = at::empty({num_bytes * group_->size()}, at::kByte);
  auto* const bits = own_.mutable_data_ptr<std::uint8_t>();
  for (std::size_t index = 0; index < num_parameters_; ++index) {
    if (is_missing[index] != 0) bits[index / 8] |= std::uint8_t{1} << (index % 8);
  }
  work_ = group_->all_gather_into(all_, own_,
                                  {.async = true, .timeout = {}, .label = "unused parameters"});
}

std::vector<std::uint8_t> MissingGradients::hear() {
  std::exchange(work_, nullptr)->wait();
  const auto row = static_cast<std::size_t>(own_.numel());
  const auto* const bits = all_.const_data_ptr<std::uint8_t>();
  std::vector<std::uint8_t> flags;
  flags.reserve(static_cast<std::size_t>(group_->size()) * num_parameters_);
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(group_->size()); ++rank) {
    for (std::size_t index = 0; index < num_parameters_; ++index) {
      flags.push_back((bits[rank * row + index / 8] >> (index % 8)) & 1);
    }
  }
  return flags;
}

}  // namespace libddp
