#pragma once

// Small tensors for the tests of this room.
//
//   expect_equal(tensor, filled({3}, 6), "sum");

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <string>

#include "tests/support/expect.h"

namespace libddp::test {

inline at::Tensor filled(at::IntArrayRef sizes, double value, at::ScalarType dtype = at::kFloat) {
  return at::full(sizes, value, dtype);
}

inline void expect_equal(const at::Tensor& actual, const at::Tensor& expected,
                         const std::string& what) {
  expect(actual.sizes() == expected.sizes() && actual.equal(expected), what);
}

}  // namespace libddp::test
