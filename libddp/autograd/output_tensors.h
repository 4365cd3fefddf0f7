#pragma once

// Finds the tensors in what a forward returns: a tensor, or tuples, pairs, vectors, maps and
// optionals of them; anything else holds none. Thread rule: pure functions.
//
//   std::vector<at::Tensor> found = output_tensors(std::make_tuple(logits, loss));

#include <ATen/core/Tensor.h>

#include <concepts>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <vector>

namespace libddp {

template <typename T>
concept TupleLike = requires {
  std::tuple_size<std::remove_cvref_t<T>>::value;
};

template <typename T>
concept OptionalLike = requires(const T& t) {
  { t.has_value() } -> std::convertible_to<bool>;
  *t;
};

template <typename T>
void collect_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (std::convertible_to<const T&, const at::Tensor&>) {
    found.push_back(value);
  } else if constexpr (TupleLike<T>) {
    std::apply([&](const auto&... parts) { (collect_tensors(parts, found), ...); }, value);
  } else if constexpr (OptionalLike<T>) {
    if (value.has_value()) collect_tensors(*value, found);
  } else if constexpr (std::ranges::range<const T>) {
    for (const auto& part : value) collect_tensors(part, found);
  }
}

template <typename T>
std::vector<at::Tensor> output_tensors(const T& output) {
  std::vector<at::Tensor> found;
  collect_tensors(output, found);
  return found;
}

}  // namespace libddp
