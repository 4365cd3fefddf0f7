#include "libddp/ddp/reducer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <fmt/format.h>

#include <optional>
#include <set>
#include <stdexcept>
#include <thread>

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

/// `n` vectors of 8 elements named p0, p1, ...; small limits so that each is a bucket of its own.
NamedTensors vectors(int n, at::ScalarType dtype = at::kFloat) {
  NamedTensors parameters;
  for (int i = 0; i < n; ++i) {
    parameters.push_back(
        {fmt::format("p{}", i), at::full({8}, i + 1.0, dtype).set_requires_grad(true)});
  }
  return parameters;
}

ReducerOptions one_bucket_each() {
  ReducerOptions options;
  options.limits = {.first_bytes = 32, .cap_bytes = 32, .last_bytes = 32};
  return options;
}

/// Gives parameter i the gradient (i + 1) * scale, for each i in `used`.
at::Tensor loss_of(const NamedTensors& parameters, const std::vector<int>& used, double scale) {
  at::Tensor loss = at::zeros({});
  for (const int i : used) loss = loss + (parameters[i].tensor * ((i + 1) * scale)).sum();
  return loss;
}

bool has_gradient(const NamedTensor& parameter, double value) {
  const at::Tensor& grad = parameter.tensor.grad();
  return grad.defined() && grad.equal(at::full_like(grad, value));
}

void clear(const NamedTensors& parameters) {
  for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
}

TEST_CASE("gradients are averaged, in buckets of their own and in one", "[reducer]") {
  const int world_size = GENERATE(1, 2, 3);
  const bool small = GENERATE(true, false);
  with_groups(world_size, [&](const Group& group) {
    const NamedTensors parameters = vectors(5);
    const auto reducer =
        Reducer::create(parameters, group, small ? one_bucket_each() : ReducerOptions{});
    expect(reducer->num_buckets() == (small ? 5u : 1u), "number of buckets");
    const double mean = (world_size + 1) / 2.0;
    for (int step = 0; step < 4; ++step) {
      clear(parameters);
      const at::Tensor loss = loss_of(parameters, {0, 1, 2, 3, 4}, group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      for (int i = 0; i < 5; ++i) expect(has_gradient(parameters[i], (i + 1) * mean), "average");
    }
  });
}

TEST_CASE("gradients stay in one place, however they are cleared", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    const auto reducer = Reducer::create(parameters, group, {});
    std::set<const void*> places;
    for (int step = 0; step < 6; ++step) {
      if (step % 2 == 0) {
        clear(parameters);
      } else {
        for (const auto& p : parameters) p.tensor.mutable_grad().zero_();
      }
      const at::Tensor loss = loss_of(parameters, {0, 1, 2}, 2 * group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(has_gradient(parameters[1], 4.0), "average");
      // The first step learns the order; the buckets are rebuilt once after it.
      if (step > 0) places.insert(parameters[1].tensor.grad().const_data_ptr());
    }
    expect(places.size() == 1, "one place");
  });
}

TEST_CASE("passes without synchronisation accumulate locally", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const double scale = group->rank() + 1;
      loss_of(parameters, {0, 1, 2}, scale).backward();
      expect(has_gradient(parameters[2], 3 * scale), "local only");
      loss_of(parameters, {0, 1}, scale).backward();
      const at::Tensor loss = loss_of(parameters, {0, 2}, scale);
      reducer->prepare_for_backward({loss});
      loss.backward();
      // p1 got nothing in the last pass, but its gradients of the passes before are averaged.
      expect(has_gradient(parameters[0], 1 * 3 * 1.5), "three shares");
      expect(has_gradient(parameters[1], 2 * 2 * 1.5), "two shares");
      expect(has_gradient(parameters[2], 3 * 2 * 1.5), "two shares");
    }
  });
}

TEST_CASE("buckets follow the order that rank 0 saw, from the second forward on", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(4);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    expect(reducer->buckets().plan() == BucketPlan{{3}, {2}, {1}, {0}}, "reverse at first");
    // Autograd runs the newest node first; the ranks disagree about which that is.
    const std::vector<int> order =
        group->rank() == 0 ? std::vector<int>{1, 0, 2, 3} : std::vector<int>{0, 1, 2, 3};
    for (int step = 0; step < 3; ++step) {
      // Gradients that are kept from the step before must survive the move.
      const at::Tensor loss = loss_of(parameters, order, 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(has_gradient(parameters[3], 4.0 * (step + 1)), "accumulated over steps");
    }
    expect(reducer->buckets().plan() == BucketPlan{{3}, {2}, {0}, {1}}, "rank 0's order");
  });
}

TEST_CASE("dtypes travel apart", "[reducer]") {
  with_groups(2, [](const Group& group) {
    NamedTensors parameters = vectors(2);
    parameters.push_back({"half", at::full({8}, 1.0, at::kHalf).set_requires_grad(true)});
    parameters.push_back({"bf16", at::full({8}, 1.0, at::kBFloat16).set_requires_grad(true)});
    parameters.push_back({"double", at::full({8}, 1.0, at::kDouble).set_requires_grad(true)});
    const auto reducer = Reducer::create(parameters, group, {});
    expect(reducer->num_buckets() == 4, "one bucket per dtype");
    at::Tensor loss = at::zeros({});
    for (const auto& p : parameters) {
      loss = loss + (p.tensor.to(at::kFloat) * (group->rank() + 1)).sum();
    }
    reducer->prepare_for_backward({loss});
    loss.backward();
    for (const auto& p : parameters) {
      expect(p.tensor.grad().scalar_type() == p.tensor.scalar_type(), p.name);
      expect(has_gradient(p, 1.5), p.name);
    }
  });
}

TEST_CASE("a parameter that one rank does not use is named on every rank", "[reducer]") {
  with_groups(3, [](const Group& group) {
    const NamedTensors parameters = vectors(4);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    const std::vector<int> used =
        group->rank() == 1 ? std::vector<int>{0, 3} : std::vector<int>{0, 1, 3};
    const at::Tensor loss = loss_of(parameters, used, 1);
    reducer->prepare_for_backward({loss});
    const std::string text = message_of<StateError>([&] { loss.backward(); });
    expect(contains(text, "2 of 4 parameters"), text);
    expect(contains(text, "'p1' (rank 1), 'p2' (all ranks)"), text);
    expect(contains(text, "find_unused_parameters=True"), text);
    expect(!contains(text, "p3"), text);

    clear(parameters);
    const at::Tensor next = loss_of(parameters, {0, 1, 2, 3}, 1);
    reducer->prepare_for_backward({next});
    next.backward();
    expect(has_gradient(parameters[2], 3.0), "goes on after the error");
  });
}

TEST_CASE("find_unused_parameters: zeros count, what nobody used stays None", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(4);
    ReducerOptions options = one_bucket_each();
    options.find_unused_parameters = true;
    const auto reducer = Reducer::create(parameters, group, options);
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const std::vector<int> used =
          group->rank() == 1 ? std::vector<int>{0} : std::vector<int>{0, 1};
      const at::Tensor loss = loss_of(parameters, used, 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(has_gradient(parameters[0], 1.0), "used by both");
      expect(has_gradient(parameters[1], 1.0), "used by rank 0: 2 / 2");
      expect(!parameters[2].tensor.grad().defined(), "used by nobody");
    }
  });
}

TEST_CASE("static graph: the first pass tells what is used", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    reducer->set_static_graph();
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const at::Tensor loss = loss_of(parameters, {0, 2}, group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(has_gradient(parameters[0], 1.5), "p0");
      expect(!parameters[1].tensor.grad().defined(), "p1");
      expect(has_gradient(parameters[2], 4.5), "p2");
    }
    expect(contains(message_of<StateError>([&] { reducer->set_static_graph(); }), "before"),
           "too late");
  });
}

TEST_CASE("two forwards may have a pass each, in any order", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(2);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const at::Tensor first = loss_of(parameters, {0, 1}, group->rank() + 1);
      reducer->prepare_for_backward({first});
      const at::Tensor second = loss_of(parameters, {0, 1}, 10 * (group->rank() + 1));
      reducer->prepare_for_backward({second});
      first.backward();
      expect(has_gradient(parameters[1], 2 * 1.5), "first");
      second.backward();
      expect(has_gradient(parameters[1], 2 * 16.5), "both");
    }
  });
}

TEST_CASE("several passes through one forward are averaged each", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(2);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const at::Tensor loss = loss_of(parameters, {0, 1}, group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward({}, /*retain_graph=*/true);
      expect(has_gradient(parameters[1], 2 * 1.5), "first");
      loss.backward();
      expect(has_gradient(parameters[1], 2 * 3.0), "both");
    }
  });
}

TEST_CASE("create_graph: averages that have a graph", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(1);
    const auto reducer = Reducer::create(parameters, group, {});
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const at::Tensor loss = (parameters[0].tensor * parameters[0].tensor).sum();
      const at::Tensor mine = loss * (group->rank() + 1);
      reducer->prepare_for_backward({mine});
      mine.backward({}, std::nullopt, /*create_graph=*/true);
      expect(has_gradient(parameters[0], 2 * 1.5), "average");
      expect(parameters[0].tensor.grad().requires_grad(), "graph");
    }
  });
}

TEST_CASE("a gradient that no rank has reached keeps its values unless views are asked for",
          "[reducer]") {
  for (const auto as_view : std::vector<std::optional<bool>>{std::nullopt, true, false}) {
    with_groups(2, [&](const Group& group) {
      const NamedTensors parameters = vectors(2);
      ReducerOptions options;
      options.find_unused_parameters = true;
      options.gradient_as_bucket_view = as_view;
      const auto reducer = Reducer::create(parameters, group, options);
      const auto pass = [&](const std::vector<int>& used) {
        const at::Tensor loss = loss_of(parameters, used, group->rank() + 1);
        reducer->prepare_for_backward({loss});
        loss.backward();
      };
      pass({0, 1});
      const at::Tensor gradient = parameters[1].tensor.grad();
      gradient.fill_(group->rank());
      for (int step = 1; step < 4; ++step) {
        pass({0});
        expect(gradient.is_same(parameters[1].tensor.grad()), "the same tensor");
        expect(has_gradient(parameters[1], as_view == true ? 0.5 : group->rank()), "its values");
      }
      if (group->rank() == 0) pass({0, 1});
      if (group->rank() == 1) pass({0});
      expect(has_gradient(parameters[1], 1.5), "the average of both");
      expect(gradient.is_same(parameters[1].tensor.grad()), "the same tensor still");
      clear(parameters);
      pass({0, 1});
      expect(has_gradient(parameters[1], 2 * 1.5), "the average of a new one");
      expect(gradient.equal(at::full({8}, 1.5)), "what it was");
    });
  }
}

TEST_CASE("gradients that are no views are the script's to keep", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(2);
    ReducerOptions options = one_bucket_each();
    options.gradient_as_bucket_view = false;
    const auto reducer = Reducer::create(parameters, group, options);
    std::vector<at::Tensor> kept;
    for (int step = 1; step < 5; ++step) {
      clear(parameters);
      const at::Tensor loss = loss_of(parameters, {0, 1}, step * (group->rank() + 1));
      reducer->prepare_for_backward({loss});
      loss.backward();
      kept.push_back(parameters[1].tensor.grad());
    }
    for (int step = 1; step < 5; ++step) {
      expect(kept[step - 1].equal(at::full({8}, 2 * 1.5 * step)), "its own step's");
    }
  });
}

TEST_CASE("parameters that change their dtype are followed", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kDouble, at::kBFloat16}) {
      clear(parameters);
      for (const auto& [name, tensor] : parameters) tensor.set_data(tensor.to(dtype));
      reducer->renew_hooks();
      reducer->follow_dtypes();
      const at::Tensor loss = loss_of(parameters, {0, 1, 2}, group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(has_gradient(parameters[2], 3 * 1.5), "average");
      expect(parameters[2].tensor.grad().scalar_type() == dtype, "dtype");
    }
  });
}

TEST_CASE("a failed collective comes out of backward on every rank", "[reducer]") {
  with_groups(3, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    const at::Tensor loss = loss_of(parameters, {0, 1, 2}, 1);
    reducer->prepare_for_backward({loss});
    group->barrier();
    if (group->rank() == 2) group->abort("the disk is full");
    const std::string text = message_of<Error>([&] { loss.backward(); });
    expect(contains(text, "the disk is full"), text);
    expect(
        contains(message_of<Error>([&] { reducer->prepare_for_backward({}); }), "the disk is full"),
        "later");
  });
}

TEST_CASE("hooks that outlive the reducer do nothing", "[reducer]") {
  with_groups(1, [](const Group& group) {
    const NamedTensors parameters = vectors(2);
    auto reducer = Reducer::create(parameters, group, {});
    const at::Tensor loss = loss_of(parameters, {0, 1}, 1);
    reducer->prepare_for_backward({loss});
    reducer = nullptr;
    loss.backward();
    expect(has_gradient(parameters[1], 2.0), "plain autograd");
  });
}

TEST_CASE("a pass that is finished by hand", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    const auto reducer = Reducer::create(parameters, group, one_bucket_each());
    expect(contains(message_of<StateError>([&] { reducer->finalize_backward_manual(); }),
                    "by themselves"),
           "not manual");
    reducer->set_manual_finalization(true);
    for (int step = 0; step < 3; ++step) {
      clear(parameters);
      const at::Tensor loss = loss_of(parameters, {0, 1, 2}, group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
      expect(contains(message_of<StateError>([&] { reducer->prepare_for_backward({}); }),
                      "finalize_backward"),
             "must be finished first");
      reducer->finalize_backward_manual();
      for (int i = 0; i < 3; ++i) expect(has_gradient(parameters[i], (i + 1) * 1.5), "average");
      expect(contains(message_of<StateError>([&] { reducer->finalize_backward_manual(); }),
                      "no backward"),
             "once");
    }
  });
}

TEST_CASE("buckets that nobody uses are not sent where that is asked for", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(3);
    ReducerOptions options = one_bucket_each();
    options.find_unused_parameters = true;
    options.skip_unused_buckets = true;
    const auto reducer = Reducer::create(parameters, group, options);
    const auto pass = [&](const std::vector<int>& used) {
      clear(parameters);
      const at::Tensor loss = loss_of(parameters, used, group->rank() + 1);
      reducer->prepare_for_backward({loss});
      loss.backward();
    };
    for (int step = 0; step < 3; ++step) {
      pass({0, 2});
      expect(has_gradient(parameters[0], 1.5) && has_gradient(parameters[2], 4.5), "averages");
      expect(!parameters[1].tensor.grad().defined(), "nobody has used it");
    }
    const std::string text = message_of<PeerError>([&] { pass({group->rank()}); });
    expect(contains(text, "bucket"), text);
  });
}

TEST_CASE("an input that is handed through as the output", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = vectors(1);
    ReducerOptions options;
    options.find_unused_parameters = true;
    const auto reducer = Reducer::create(parameters, group, options);
    const at::Tensor input = at::full({8}, 1.0).set_requires_grad(true);
    for (int step = 0; step < 4; ++step) {
      clear(parameters);
      const bool used = group->rank() == step % 2;
      const at::Tensor output = used ? input * parameters[0].tensor : input;
      reducer->prepare_for_backward({output});
      output.sum().backward();
      expect(has_gradient(parameters[0], 0.5), "half of the gradient of the rank that used it");
    }
  });
}

TEST_CASE("reducers over common parameters average each its own passes", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors all = vectors(3);
    const NamedTensors of_first{all[0], all[1]};
    const NamedTensors of_second{all[0], all[2]};
    const auto first = Reducer::create(of_first, group, one_bucket_each());
    const auto second = Reducer::create(of_second, group, one_bucket_each());
    const double mine = group->rank() + 1;
    for (int pass = 0; pass < 3; ++pass) {
      clear(all);
      const at::Tensor one = loss_of(all, {0, 1}, mine), other = loss_of(all, {0, 2}, mine);
      first->prepare_for_backward({one});
      second->prepare_for_backward({other});
      (one + other).backward();
      expect(has_gradient(all[0], 2 * 1.5), "of both losses");
      expect(has_gradient(all[1], 2 * 1.5) && has_gradient(all[2], 3 * 1.5), "their own");

      clear(all);
      const at::Tensor alone = loss_of(all, {0, 1}, mine), late = loss_of(all, {0, 2}, mine);
      first->prepare_for_backward({alone});
      second->prepare_for_backward({late});
      alone.backward();
      expect(has_gradient(all[0], 1.5), "the second one's pass has not begun");
      expect(!all[2].tensor.grad().defined(), "nor touched anything");
      late.backward();
      expect(has_gradient(all[0], 2 * 1.5), "the average on top of the other one");
    }
  });
}

TEST_CASE("a pass that failed does not keep gradients from other reducers", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors all = vectors(2);
    const auto whole = Reducer::create(all, group, {});
    const auto part = Reducer::create({all[0]}, group, {});
    const double mine = group->rank() + 1;
    const at::Tensor loss = loss_of(all, {0, 1}, mine);
    whole->prepare_for_backward({loss});
    const unsigned hook = all[1].tensor.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook's own error"); });
    expect(contains(message_of<std::runtime_error>([&] { loss.backward(); }), "own error"),
           "fails");
    all[1].tensor.remove_hook(hook);
    clear(all);
    part->prepare_for_backward({});
    loss_of(all, {0}, mine).backward();
    expect(has_gradient(all[0], 1.5), "averaged, though nobody saw the pass begin");
  });
}

TEST_CASE("a reducer without parameters ends its passes", "[reducer]") {
  with_groups(2, [](const Group& group) {
    const auto reducer = Reducer::create({}, group, {});
    const at::Tensor other = at::full({8}, 1.0).set_requires_grad(true);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = (other * 2).sum();
      reducer->prepare_for_backward({loss});
      loss.backward();
    }
    expect(other.grad().equal(at::full({8}, 6.0)), "left alone");
  });
}

}  // namespace
}  // namespace libddp
