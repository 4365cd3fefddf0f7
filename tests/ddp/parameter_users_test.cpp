#include "libddp/ddp/parameter_users.h"

#include <ATen/ops/zeros.h>

#include <optional>
#include <utility>

#include "tests/support/catch.h"

namespace libddp {
namespace {

TEST_CASE("users of a parameter know of each other while they live", "[parameter_users]") {
  const at::Tensor parameter = at::zeros({2});
  ParameterUser first(parameter);
  const ParameterUser other(at::zeros({2}));
  CHECK_FALSE(first.is_common());
  {
    ParameterUser second(parameter);
    const ParameterUser moved = std::move(second);
    CHECK(first.is_common());
    CHECK(moved.is_common());
    CHECK_FALSE(first.is_disputed());
    first.claim();
    first.claim();
    CHECK(moved.is_disputed());
    CHECK(first.is_disputed());
  }
  CHECK_FALSE(first.is_common());
  CHECK_FALSE(first.is_disputed());
  CHECK_FALSE(other.is_common());
}

TEST_CASE("a claim ends with its user", "[parameter_users]") {
  const at::Tensor parameter = at::zeros({2});
  const ParameterUser first(parameter);
  std::optional<ParameterUser> claiming(parameter);
  claiming->claim();
  claiming.reset();
  const ParameterUser second(parameter);
  CHECK(first.is_common());
  CHECK_FALSE(first.is_disputed());
}

TEST_CASE("a pass is seen by all users of a common parameter", "[parameter_users]") {
  const at::Tensor parameter = at::zeros({2});
  const ParameterUser first(parameter);
  {
    ParameterPass alone;
    alone.add(first);
    CHECK_FALSE(first.is_in_pass());
  }
  const ParameterUser second(parameter);
  {
    ParameterPass pass;
    pass.add(second);
    CHECK(first.is_in_pass());
  }
  CHECK_FALSE(first.is_in_pass());
}

}  // namespace
}  // namespace libddp
