// Units of which some parameters are frozen, from the beginning or later, where the array
// exists once and where it is gathered.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/sharded_model.h"
#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Wide ones are averaged each by itself.
constexpr int kNarrow = 6;
constexpr int kWideModel = 190;

at::Tensor weight(int width, double seed) {
  const at::Tensor values = at::sin(at::arange(width * width, at::kFloat) * 0.37 + seed);
  return (values.view({width, width}) / width).set_requires_grad(true);
}

/// Two units of two products; autograd keeps the parameters themselves for the backward pass.
struct Products {
  std::vector<NamedTensors> units;

  explicit Products(int width) {
    for (int unit = 0; unit < 2; ++unit) {
      units.push_back({{"first", weight(width, unit)}, {"second", weight(width, unit + 9)}});
    }
  }
  at::Tensor run(int unit, const at::Tensor& x) const {
    return at::matmul(at::tanh(at::matmul(x, units[unit][0].tensor)), units[unit][1].tensor);
  }
  const at::Tensor& parameter(int index) const { return units[index / 2][index % 2].tensor; }
  /// Bit i: parameter i is trained.
  void train(unsigned bits) const {
    for (int i = 0; i < 4; ++i) parameter(i).set_requires_grad((bits >> i & 1u) != 0);
  }
};

class Model {
 public:
  Model(const ShardOptions& options, int width, unsigned bits) : products_(width) {
    products_.train(bits);
    std::vector<std::shared_ptr<ParamGroup>> units{
        std::make_shared<ParamGroup>("", NamedTensors{}, options)};
    for (int i = 0; i < 2; ++i) {
      units.push_back(std::make_shared<ParamGroup>(std::to_string(i), products_.units[i], options));
    }
    model_ = ShardedModel::create(std::move(units), {});
  }

  at::Tensor forward(at::Tensor x) {
    model_->before_forward(*model_->units()[0]);
    for (int i = 0; i < 2; ++i) {
      ParamGroup& unit = *model_->units()[i + 1];
      model_->before_forward(unit);
      x = products_.run(i, x);
      model_->after_forward(unit, {x});
    }
    model_->after_forward(*model_->units()[0], {x});
    return x;
  }
  const Products& products() const { return products_; }
  ShardedModel& model() { return *model_; }

 private:
  Products products_;
  std::shared_ptr<ShardedModel> model_;
};

at::Tensor input(int width) { return at::ones({3, width}).set_requires_grad(true); }

/// The same inputs on all ranks, so averages are the gradients of one.
void compare(ProcessGroup& group, int width, const std::vector<unsigned>& choices) {
  const Products plain(width);
  Model sharded({.shard = group.shared_from_this()}, width, choices.front());
  for (const unsigned bits : choices) {
    plain.train(bits);
    sharded.products().train(bits);
    const at::Tensor wanted_input = input(width);
    plain.run(1, plain.run(0, wanted_input)).pow(2).sum().backward();
    const at::Tensor found_input = input(width);
    sharded.forward(found_input).pow(2).sum().backward();
    expect_equal(found_input.grad(), wanted_input.grad(), "gradient of the input");
    const auto& units = sharded.model().units();
    for (int i = 0; i < 4; ++i) {
      const bool is_trained = (bits >> i & 1u) != 0;
      expect(sharded.products().parameter(i).grad().defined() == is_trained, "only of the trained");
    }
    sharded.model().show_copies(units, {.with_gradients = true});
    for (int i = 0; i < 4; ++i) {
      const at::Tensor& wanted = plain.parameter(i).grad();
      if (!wanted.defined()) continue;
      expect_equal(sharded.products().parameter(i).grad(), wanted, "gradient " + std::to_string(i));
    }
    sharded.model().end_copies(false);
    for (int i = 0; i < 4; ++i) {
      plain.parameter(i).mutable_grad() = at::Tensor();
      sharded.products().parameter(i).mutable_grad() = at::Tensor();
    }
  }
}

}  // namespace

TEST_CASE("parameters are frozen and unfrozen between passes", "[freezing]") {
  // Frozen before and behind trained ones of the same unit, whole units, one parameter alone.
  const std::vector<unsigned> kChoices{0b1111, 0b1010, 0b0101, 0b1100,
                                       0b0011, 0b0000, 0b0001, 0b1111};
  const std::vector<std::vector<int>> kHosts{{0}, {0, 0}, {0, 1}};
  for (const auto& hosts : kHosts) {
    for (const int width : {kNarrow, kWideModel}) {
      for (std::size_t first = 0; first < kChoices.size(); first += 2) {
        const std::vector<unsigned> choices(kChoices.begin() + static_cast<std::ptrdiff_t>(first),
                                            kChoices.end());
        run_group_on_hosts(hosts, [&](ProcessGroup& group) { compare(group, width, choices); });
      }
    }
  }
}

TEST_CASE("what is frozen is not averaged", "[freezing]") {
  run_group(2, [&](ProcessGroup& group) {
    Model sharded({.shard = group.shared_from_this()}, kWideModel, 0b1111);
    const auto collectives_of_a_step = [&](unsigned bits) {
      sharded.products().train(bits);
      const std::uint64_t before = group.sequence_number();
      sharded.forward(input(kWideModel)).sum().backward();
      for (int i = 0; i < 4; ++i) sharded.products().parameter(i).mutable_grad() = at::Tensor();
      return group.sequence_number() - before;
    };
    expect(collectives_of_a_step(0b1111) == 4, "two barriers, two averages");
    expect(collectives_of_a_step(0b1100) == 4, "two barriers, one average, one barrier");
    expect(collectives_of_a_step(0b0000) == 3, "three barriers");
    expect(collectives_of_a_step(0b1111) == 4, "as at first");
  });
}

TEST_CASE("ranks that train other parameters are told", "[freezing]") {
  run_group(2, [&](ProcessGroup& group) {
    Model sharded({.shard = group.shared_from_this()}, kNarrow, 0b1111);
    sharded.products().train(group.rank() == 0 ? 0b1111 : 0b0111);
    const std::string text = message_of<Error>([&] { sharded.forward(input(kNarrow)); });
    expect(contains(text, "trains 3 of 4") && contains(text, "a sharded forward"), text);
  });
}
