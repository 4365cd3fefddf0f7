#pragma once

// Three parameters of 8 elements for reducers, and options that give each a bucket of its own.
//
//   const NamedTensors parameters = three_vectors();
//   const auto reducer = Reducer::create(parameters, group, a_bucket_each());

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "libddp/ddp/reducer.h"

namespace libddp::test {

inline NamedTensors three_vectors() {
  NamedTensors parameters;
  for (int i = 0; i < 3; ++i) {
    parameters.push_back({fmt::format("p{}", i), at::full({8}, i + 1.0).set_requires_grad(true)});
  }
  return parameters;
}

inline ReducerOptions a_bucket_each() {
  ReducerOptions options;
  options.limits = {.first_bytes = 32, .cap_bytes = 32, .last_bytes = 32};
  return options;
}

}  // namespace libddp::test
