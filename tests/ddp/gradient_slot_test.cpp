#include "libddp/ddp/gradient_slot.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::message_of;

bool shows(const at::Tensor& parameter, const at::Tensor& view) {
  return parameter.grad().const_data_ptr() == view.const_data_ptr();
}

TEST_CASE("an empty gradient without a bucket is not in one", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({0, 3});
  const GradientSlot slot("w", parameter);
  parameter.mutable_grad() = at::zeros({0, 3});
  CHECK_FALSE(slot.shows_bucket());
}

TEST_CASE("a gradient of autograd's own moves into the view", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({2, 3});
  const at::Tensor view = at::full({2, 3}, 9.0);
  GradientSlot slot("w", parameter);
  slot.move_to(view);
  CHECK_FALSE(slot.has_gradient());

  parameter.mutable_grad() = at::arange(6).to(at::kFloat).view({2, 3});
  const at::Tensor values = parameter.grad().clone();
  slot.adopt();
  CHECK(shows(parameter, view));
  CHECK(view.equal(values));

  SECTION("and is left alone from then on") {
    parameter.grad().add_(1);
    slot.adopt();
    CHECK(shows(parameter, view));
    CHECK(view.equal(values + 1));
  }
  SECTION("another tensor over the same bytes is replaced without a copy") {
    parameter.mutable_grad() = view.detach();
    slot.adopt();
    CHECK(shows(parameter, view));
    CHECK(view.equal(values));
  }
  SECTION("and is the same tensor in the next pass, where it was set to None") {
    const at::TensorImpl* const before = parameter.grad().unsafeGetTensorImpl();
    parameter.mutable_grad() = at::ones({2, 3});
    slot.adopt();
    CHECK(parameter.grad().unsafeGetTensorImpl() == before);
    CHECK(view.equal(at::ones({2, 3})));
  }
  SECTION("and stays what it was where somebody has kept it") {
    const bool is_view = GENERATE(false, true);
    const at::Tensor kept = is_view ? parameter.grad().view({-1}) : parameter.grad();
    for (int pass = 0; pass < 3; ++pass) {
      parameter.mutable_grad() = at::full({2, 3}, static_cast<float>(pass));
      slot.adopt();
      CHECK(shows(parameter, view));
      CHECK(view.equal(at::full({2, 3}, static_cast<float>(pass))));
      CHECK(kept.view({2, 3}).equal(values));
    }
    parameter.mutable_grad() = at::Tensor();
    slot.fill_without_gradient();
    CHECK(kept.view({2, 3}).equal(values));
  }
  SECTION("and another view of it is added to as it is seen") {
    const at::Tensor square = at::zeros({2, 2});
    GradientSlot turned("w", square);
    turned.move_to(at::zeros({2, 2}));
    square.mutable_grad() = at::arange(4).to(at::kFloat).view({2, 2});
    turned.adopt();
    square.mutable_grad() = square.grad().t();
    turned.adopt();
    CHECK(square.grad().equal(at::arange(4).to(at::kFloat).view({2, 2}).t()));
    CHECK(shows(square, turned.view()));
  }
  SECTION("a script gives it other memory: p.grad.data = ...") {
    const at::Tensor before = parameter.grad();
    before.set_data(values + 1);
    CHECK(view.equal(values));
    CHECK_FALSE(slot.shows_bucket());
    SECTION("and autograd adds to that") {
      parameter.grad().add_(1);
      slot.adopt();
      CHECK(view.equal(values + 2));
    }
    SECTION("and no pass reaches it") {
      slot.fill_without_gradient();
      CHECK(view.equal(values + 1));
    }
    SECTION("after the pass has taken it") {
      view.fill_(7);
      slot.install();
    }
    SECTION("which is the device's way") {
      slot.check_gradient();
      slot.show_bucket();
    }
    SECTION("and the buckets are made anew") {
      slot.leave_bucket();
      const at::Tensor next = at::zeros({2, 3});
      slot.move_to(next);
      CHECK(next.equal(values + 1));
      CHECK(shows(parameter, next));
      return;
    }
    CHECK(shows(parameter, view));
    CHECK_FALSE(parameter.grad().is_same(before));
    CHECK(before.const_data_ptr() != view.const_data_ptr());
    parameter.grad().detach_();
  }
}

TEST_CASE("a gradient that a script has given stays the tensor that it is", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({2, 3});
  const at::Tensor view = at::zeros({2, 3});
  GradientSlot slot("w", parameter);
  slot.keep_given(true);
  slot.move_to(view);
  const at::Tensor flat = at::zeros({6});
  parameter.mutable_grad() = flat.view({2, 3});
  const at::Tensor incoming = at::ones({2, 3});
  parameter.grad().add_(incoming);
  slot.notice(incoming);
  slot.adopt();
  CHECK(view.equal(incoming));
  view.fill_(5);
  slot.install();
  CHECK(flat.equal(at::full({6}, 5.0)));

  SECTION("in another bucket too") {
    slot.leave_bucket();
    slot.move_to(at::zeros({2, 3}));
    CHECK(parameter.grad().storage().is_alias_of(flat.storage()));
  }
  SECTION("and the next one is autograd's again") {
    parameter.mutable_grad() = incoming.detach();
    slot.notice(incoming);
    CHECK_FALSE(slot.is_apart());
    slot.adopt();
    CHECK(shows(parameter, view));
    CHECK(flat.equal(at::full({6}, 5.0)));
  }
  SECTION("unless gradients are to be in their buckets") {
    slot.keep_given(false);
    slot.adopt();
    CHECK(shows(parameter, view));
  }
}

TEST_CASE("a gradient that somebody has is the same tensor in another bucket", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({2, 3});
  const at::Tensor first = at::zeros({2, 3});
  const at::Tensor second = at::zeros({2, 3});
  GradientSlot slot("w", parameter);
  slot.keep_given(true);
  slot.move_to(first);
  parameter.mutable_grad() = at::ones({2, 3});
  slot.notice(at::Tensor());
  slot.adopt();
  const bool is_view = GENERATE(false, true);
  const at::Tensor kept = is_view ? parameter.grad().view({6}) : parameter.grad();
  slot.leave_bucket();
  slot.move_to(second);
  CHECK(shows(parameter, second));
  second.fill_(2);
  CHECK(kept.view({2, 3}).equal(second));
}

TEST_CASE("large and oddly strided gradients are copied too", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({300, 400});
  const at::Tensor view = at::zeros({300, 400});
  GradientSlot slot("w", parameter);
  slot.move_to(view);
  SECTION("large") { parameter.mutable_grad() = at::full({300, 400}, 2.0); }
  SECTION("transposed") { parameter.mutable_grad() = at::full({400, 300}, 2.0).t(); }
  SECTION("expanded") { parameter.mutable_grad() = at::full({1, 1}, 2.0).expand({300, 400}); }
  slot.adopt();
  CHECK(view.equal(at::full({300, 400}, 2.0)));
}

TEST_CASE("no gradient counts as zeros", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({4});
  const at::Tensor view = at::full({4}, 9.0);
  GradientSlot slot("w", parameter);
  slot.move_to(view);
  SECTION("adopt shows them") {
    slot.adopt();
    CHECK(shows(parameter, view));
  }
  SECTION("fill_without_gradient leaves .grad None") {
    slot.fill_without_gradient();
    CHECK_FALSE(parameter.grad().defined());
    slot.install();
    CHECK(shows(parameter, view));
  }
  CHECK(view.equal(at::zeros({4})));
}

TEST_CASE("a gradient keeps its values from one bucket to the next", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({4});
  GradientSlot slot("w", parameter);
  slot.move_to(at::zeros({4}));
  parameter.mutable_grad() = at::full({4}, 5.0);
  slot.adopt();
  slot.leave_bucket();
  const at::Tensor next = at::zeros({4});
  slot.move_to(next);
  CHECK(shows(parameter, next));
  CHECK(next.equal(at::full({4}, 5.0)));
}

TEST_CASE("zero-size parameters are fine", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({0, 3});
  GradientSlot slot("w", parameter);
  const at::Tensor view = at::zeros({0, 3});
  slot.move_to(view);
  parameter.mutable_grad() = at::zeros({0, 3});
  slot.adopt();
  CHECK(shows(parameter, view));
}

TEST_CASE("a gradient that two slots average stays apart from both buckets", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({2, 3});
  const at::Tensor views[2] = {at::zeros({2, 3}), at::zeros({2, 3})};
  GradientSlot first("w", parameter);
  first.move_to(views[0]);
  parameter.mutable_grad() = at::full({2, 3}, 5.0);
  first.adopt();
  CHECK(shows(parameter, views[0]));
  {
    GradientSlot second("w", parameter);
    second.move_to(views[1]);
    CHECK(shows(parameter, views[0]));
    second.adopt();
    CHECK(views[1].equal(at::full({2, 3}, 5.0)));
    first.adopt();
    CHECK_FALSE(first.shows_bucket());
    const at::Tensor grad = parameter.grad();
    views[0].fill_(7);
    views[1].fill_(8);
    CHECK(grad.equal(at::full({2, 3}, 5.0)));
    first.install();
    CHECK(grad.equal(views[0]));
    second.install();
    CHECK(parameter.grad().is_same(grad));
    CHECK(grad.equal(views[1]));
    parameter.mutable_grad() = at::Tensor();
    second.fill_without_gradient();
    CHECK_FALSE(second.has_gradient());
    CHECK(views[1].equal(at::zeros({2, 3})));
    first.install();
    CHECK(parameter.grad().equal(views[0]));
    CHECK_FALSE(first.shows_bucket());
  }
  first.adopt();
  CHECK(shows(parameter, views[0]));
}

TEST_CASE("a gradient that does not fit is refused by name", "[gradient_slot]") {
  const at::Tensor parameter = at::zeros({4});
  GradientSlot slot("head.weight", parameter);
  slot.move_to(at::zeros({4}));
  const auto adopt = [&] { slot.adopt(); };
  parameter.mutable_grad() = at::zeros({4}, at::kDouble);
  std::string text = message_of<ArgumentError>(adopt);
  CHECK(contains(text, "'head.weight'"));
  CHECK(contains(text, "Double [4]"));
  CHECK(contains(text, "Float [4]"));
  parameter.mutable_grad() = at::zeros({5});
  CHECK(contains(message_of<ArgumentError>(adopt), "[5]"));
  parameter.mutable_grad() = at::ones({4}).to_sparse();
  text = message_of<ArgumentError>(adopt);
  CHECK(contains(text, "a sparse tensor"));
  CHECK(contains(text, "must be known when the model is wrapped"));
  CHECK(contains(text, "sparse=False"));
}

}  // namespace
}  // namespace libddp
