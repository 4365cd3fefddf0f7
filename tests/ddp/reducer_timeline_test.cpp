// What a Reducer tells about itself: the layout of its buckets and the times of its passes.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <fmt/format.h>

#include "libddp/base/error.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/reducer.h"
#include "tests/ddp/three_vectors.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::a_bucket_each;
using test::contains;
using test::expect;
using test::message_of;
using test::three_vectors;
using test::with_groups;

at::Tensor sum_of(const NamedTensors& parameters) {
  at::Tensor sum = at::zeros({});
  for (const NamedTensor& parameter : parameters) sum = sum + parameter.tensor.sum();
  return sum;
}

void step(Reducer& reducer, const NamedTensors& parameters) {
  reducer.prepare_for_forward();
  const at::Tensor loss = sum_of(parameters);
  reducer.prepare_for_backward({loss});
  loss.backward();
}

void expect_order(const PassTimes& pass) {
  expect(0 < pass.forward_begin_ns && pass.forward_begin_ns <= pass.forward_end_ns, "forward");
  expect(pass.forward_end_ns <= pass.backward_begin_ns, "backward after forward");
  expect(pass.backward_begin_ns <= pass.backward_end_ns, "backward");
  expect(pass.backward_end_ns <= pass.pass_end_ns, "end of the pass");
  for (const BucketTimes& bucket : pass.buckets) {
    expect(pass.backward_begin_ns <= bucket.ready_ns, "ready");
    expect(bucket.ready_ns <= bucket.launched_ns, "launched after ready");
    expect(bucket.launched_ns <= bucket.done_ns, "done after launched");
    expect(bucket.done_ns <= pass.pass_end_ns, "done before the end");
  }
}

TEST_CASE("every pass that synchronises leaves its times", "[reducer][timeline]") {
  const int world_size = GENERATE(1, 2, 3);
  const bool has_hook = GENERATE(false, true);
  with_groups(world_size, [&](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto reducer = Reducer::create(parameters, group, a_bucket_each());
    if (has_hook) reducer->register_comm_hook(compress_hook(group, at::kBFloat16));
    for (int i = 0; i < 3; ++i) step(*reducer, parameters);
    sum_of(parameters).backward();  // synchronises nothing
    reducer->run_empty_pass();

    const std::vector<PassTimes> passes = reducer->timeline().passes();
    expect(passes.size() == 4, "number of passes");
    for (std::size_t i = 0; i < 3; ++i) {
      expect(passes[i].number == i + 1, "number of the pass");
      expect(passes[i].buckets.size() == 3, "times of each bucket");
      expect_order(passes[i]);
    }
    expect(passes[3].forward_begin_ns == 0, "an empty pass has no forward");
    expect(passes[3].buckets[2].done_ns >= passes[3].buckets[0].launched_ns, "an empty pass");
  });
}

TEST_CASE("a pass that raises leaves no times, and the next one its own", "[reducer][timeline]") {
  with_groups(1, [](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto reducer = Reducer::create(parameters, group, ReducerOptions{});
    const at::Tensor loss = sum_of(parameters);
    reducer->prepare_for_backward({loss});
    const unsigned hook = parameters[0].tensor.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook's own error"); });
    const std::string text = message_of<std::runtime_error>([&] { loss.backward(); });
    expect(contains(text, "own error"), text);
    parameters[0].tensor.remove_hook(hook);
    expect(reducer->timeline().passes().empty(), "no record");
    for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    step(*reducer, parameters);
    expect(reducer->timeline().passes().size() == 1, "a record");
    expect_order(reducer->timeline().passes().front());
  });
}

TEST_CASE("the layout names what lies where, before and after the rebuild", "[reducer][layout]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = three_vectors();
    const auto reducer = Reducer::create(parameters, group, a_bucket_each());
    expect(!reducer->layout().is_rebuilt, "the initial layout");
    const BucketDescription first = reducer->layout().buckets.at(0);
    expect(first.names == std::vector<std::string>{"p2"}, "reverse order");
    expect(first.dtype == at::kFloat && first.gradient_bytes == 32, "size");
    expect(first.total_bytes > 32 && first.is_in_arena, "padding, flags, arena");
    expect(contains(to_string(reducer->layout()), "bucket 0: Float, 32 bytes"), "text");
    expect(contains(to_string(reducer->layout()), "in the reverse order of"), "order in the text");

    step(*reducer, parameters);
    step(*reducer, parameters);
    expect(reducer->layout().is_rebuilt, "the order of the gradients");
    std::size_t num_names = 0;
    for (const auto& bucket : reducer->layout().buckets) num_names += bucket.names.size();
    expect(num_names == 3, "every parameter");
    expect(!reducer->timeline().passes().front().layout->is_rebuilt, "the layout of its time");
  });
}

TEST_CASE("memory that no rank shares is not in the arena", "[group]") {
  with_groups(1, [](const Group& group) {
    expect(group->is_in_arena(group->allocate({4})), "allocated there");
    expect(!group->is_in_arena(at::zeros({4})), "allocated elsewhere");
  });
}

}  // namespace
}  // namespace libddp
