#include "libddp/ddp/replicated_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "libddp/base/error.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::contains;
using test::expect;
using test::message_of;
using test::with_groups;

at::Tensor parameter(at::IntArrayRef sizes, double value) {
  return at::full(sizes, value).set_requires_grad(true);
}

/// Wraps on each rank what `model(rank)` gives; the error must be the same everywhere.
std::string disagreement(const std::function<NamedTensors(int)>& model) {
  std::string text;
  with_groups(3, [&](const Group& group) {
    const std::string mine =
        message_of<ArgumentError>([&] { ReplicatedModel(model(group->rank()), {}, group, {}); });
    if (group->rank() == 0) text = mine;
    expect(contains(mine, "the ranks wrap different models"), mine);
  });
  return text;
}

TEST_CASE("everybody starts from rank 0's values", "[replica]") {
  with_groups(3, [](const Group& group) {
    const double mine = group->rank() + 1;
    const at::Tensor big = parameter({5 << 20}, mine);  // more than one message
    const at::Tensor transposed = at::full({3, 4}, mine).t().set_requires_grad(true);
    const at::Tensor strided = at::full({4, 6}, mine).slice(1, 0, 6, 2);
    const at::Tensor count = at::full({}, 100 * mine, at::kLong);
    const at::Tensor empty = at::zeros({0});
    const NamedTensors parameters = {{"big", big}, {"transposed", transposed}};
    const NamedTensors buffers = {{"strided", strided}, {"count", count}, {"empty", empty}};
    const ReplicatedModel replica(parameters, buffers, group, {});
    expect(big.eq(1.0).all().item<bool>(), "more than one message");
    expect(transposed.eq(1.0).all().item<bool>(), "a transposed parameter");
    expect(strided.eq(1.0).all().item<bool>(), "a buffer with gaps");
    expect(count.item<long>() == 100, "an integer buffer");
  });
}

TEST_CASE("init_sync=false leaves the values alone", "[replica]") {
  with_groups(2, [](const Group& group) {
    const at::Tensor w = parameter({2}, group->rank());
    const ReplicatedModel replica({{"w", w}}, {}, group, {.init_sync = false});
    expect(w.eq(group->rank()).all().item<bool>(), "own value");
  });
}

TEST_CASE("the first difference between models is named on all ranks", "[replica]") {
  SECTION("a shape") {
    const std::string text = disagreement([](int rank) {
      return NamedTensors{{"same", parameter({2}, 0)},
                          {"h.0.weight", parameter({rank == 2 ? 4 : 3, 3}, 0)}};
    });
    CHECK(contains(text, "rank 2 has parameter 'h.0.weight' Float [4, 3]"));
    CHECK(contains(text, "rank 0 has parameter 'h.0.weight' Float [3, 3]"));
  }
  SECTION("a name") {
    const std::string text = disagreement([](int rank) {
      return NamedTensors{{rank == 1 ? "other" : "w", parameter({2}, 0)}};
    });
    CHECK(contains(text, "rank 1 has parameter 'other'"));
  }
  SECTION("requires_grad") {
    const std::string text = disagreement([](int rank) {
      return NamedTensors{{"w", at::zeros({2}).set_requires_grad(rank != 1)}};
    });
    CHECK(contains(text, "requires_grad=false"));
  }
  SECTION("one more") {
    const std::string text = disagreement([](int rank) {
      NamedTensors model{{"w", parameter({2}, 0)}};
      if (rank == 1) model.push_back({"extra", parameter({2}, 0)});
      return model;
    });
    CHECK(contains(text, "rank 1 has parameter 'extra'"));
  }
  SECTION("an option") {
    with_groups(2, [](const Group& group) {
      const std::string text = message_of<ArgumentError>([&] {
        ReplicatedModel({{"w", parameter({2}, 0)}}, {}, group,
                        {.find_unused_parameters = group->rank() == 1});
      });
      expect(contains(text, "find_unused_parameters=true"), text);
    });
  }
}

TEST_CASE("a module without gradients, and parameters that cannot be served", "[replica]") {
  with_groups(1, [](const Group& group) {
    const at::Tensor frozen = at::zeros({2});
    std::string text = message_of<ArgumentError>([&] {
      ReplicatedModel({{"frozen", frozen}}, {}, group, {});
    });
    expect(contains(text, "DistributedDataParallel is not needed when a module doesn't have"),
           text);
    const at::Tensor derived = parameter({2}, 1) * 2;
    text = message_of<ArgumentError>([&] {
      ReplicatedModel({{"derived", derived}}, {}, group, {});
    });
    expect(contains(text, "'derived'") && contains(text, "not a leaf"), text);
  });
}

TEST_CASE("parameters that are frozen for a while are unused", "[replica]") {
  with_groups(2, [](const Group& group) {
    const at::Tensor one = parameter({2}, 1);
    const at::Tensor other = parameter({2}, 1);
    ReplicatedModel replica({{"one", one}, {"other", other}}, {}, group,
                            {.find_unused_parameters = true});
    for (const bool frozen : {true, false, true}) {
      one.mutable_grad() = at::Tensor();
      one.set_requires_grad(!frozen);
      replica.before_forward();
      const at::Tensor loss = ((one + other) * (group->rank() + 1)).sum();
      expect(replica.after_forward({loss}, true), "synchronises");
      loss.backward();
      expect(one.grad().defined() != frozen, "one");
      expect(frozen || one.grad().eq(1.5).all().item<bool>(), "average");
    }
  });
}

TEST_CASE("a model that is frozen as a whole exchanges nothing", "[replica]") {
  with_groups(2, [](const Group& group) {
    const at::Tensor w = parameter({2}, 1);
    ReplicatedModel replica({{"w", w}}, {}, group, {});
    w.set_requires_grad(false);
    if (group->rank() == 0) {
      const at::Tensor input = parameter({2}, 1);
      replica.before_forward();
      const at::Tensor loss = (w * input).sum();
      expect(replica.after_forward({loss}, true), "synchronises as ever");
      loss.backward();
    }
    w.set_requires_grad(true);
    replica.before_forward();
    const at::Tensor loss = (w * (group->rank() + 1)).sum();
    replica.after_forward({loss}, true);
    loss.backward();
    expect(w.grad().eq(1.5).all().item<bool>(), "average");
  });
}

TEST_CASE("a parameter that is unfrozen after wrapping is refused by name", "[replica]") {
  with_groups(1, [](const Group& group) {
    const at::Tensor w = parameter({2}, 1);
    const at::Tensor frozen = at::zeros({2});
    ReplicatedModel replica({{"w", w}, {"frozen", frozen}}, {}, group, {});
    expect(replica.after_forward({}, true), "synchronises");
    frozen.set_requires_grad(true);
    const std::string text = message_of<ArgumentError>([&] { replica.after_forward({}, true); });
    expect(contains(text, "rank 0/1] forward: parameter 'frozen' had requires_grad=false"), text);
  });
}

TEST_CASE("a changed shape is refused at the next forward", "[replica]") {
  with_groups(1, [](const Group& group) {
    const at::Tensor w = parameter({2, 3}, 1);
    ReplicatedModel replica({{"w", w}}, {}, group, {});
    expect(replica.after_forward({}, true), "synchronises");
    w.set_data(at::zeros({3, 2}));
    const std::string text = message_of<ArgumentError>([&] { replica.after_forward({}, true); });
    expect(contains(text, "'w' had shape [2, 3] when it was wrapped and has shape [3, 2]"), text);
  });
}

TEST_CASE("one rank with parameters elsewhere is named by all", "[replica]") {
  const std::string text = disagreement([](int rank) {
    const at::Device device(rank == 1 ? at::kMeta : at::kCPU);
    return NamedTensors{{"w", at::zeros({2}, device).set_requires_grad(true)}};
  });
  CHECK(contains(text, "rank 1 has parameter 'w' Float [2] requires_grad=true on meta"));
}

}  // namespace
}  // namespace libddp
