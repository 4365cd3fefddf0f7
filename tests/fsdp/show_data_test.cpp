#include "libddp/fsdp/show_data.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include "tests/support/catch.h"

namespace libddp {

TEST_CASE("A tensor shows other data and stays itself") {
  const at::Tensor array = at::arange(12, at::kFloat);
  const at::Tensor shown = array.narrow(0, 0, 6).view({2, 3}).detach().set_requires_grad(true);
  // What detach() returns may only change through set_data.
  const bool is_plain = GENERATE(true, false);
  shown.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(is_plain);
  const at::Tensor same_object = shown;
  const auto version = shown._version();

  SECTION("elsewhere in its storage") {
    show_data(shown, array.narrow(0, 8, 4).view({4, 1}));
    REQUIRE(shown.sizes() == at::IntArrayRef({4, 1}));
    REQUIRE(shown.is_contiguous());
    REQUIRE(shown.numel() == 4);
    REQUIRE(shown.storage_offset() == 8);
    REQUIRE(shown.is_alias_of(array));
  }
  SECTION("in another storage, transposed") {
    const at::Tensor other = at::arange(20, at::kFloat).view({4, 5}).t();
    show_data(shown, other);
    REQUIRE(at::equal(shown, other));
    REQUIRE(shown.is_alias_of(other));
    REQUIRE_FALSE(shown.is_contiguous());
  }
  SECTION("without any elements") {
    show_data(shown, array.narrow(0, 12, 0).view({0, 3}));
    REQUIRE(shown.numel() == 0);
    REQUIRE(shown.dim() == 2);
  }
  SECTION("of another dtype") {
    const at::Tensor other = at::zeros({3}, at::kBFloat16);
    show_data(shown, other);
    REQUIRE(shown.scalar_type() == at::kBFloat16);
    REQUIRE(shown.is_alias_of(other));
  }
  REQUIRE(shown.is_same(same_object));
  REQUIRE(shown.requires_grad());
  REQUIRE(shown.is_leaf());
  REQUIRE(shown._version() == version);
}

}  // namespace libddp
