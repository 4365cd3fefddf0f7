#pragma once

// Small tensors for the tests of this room.
//
//   expect_equal(tensor, full_of({3}, 6), "sum");

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "tests/support/torch_group_fixture.h"

namespace libddp::test {

inline at::Tensor full_of(at::IntArrayRef sizes, double value, at::ScalarType dtype = at::kFloat) {
  return at::full(sizes, value, dtype);
}

}  // namespace libddp::test
